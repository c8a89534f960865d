//! The few things that are asked of the CUDA driver, as values that clean up after themselves.
//!
//! cudarc finds the library and has the functions' types. It panics where the library or a function is missing, so both are
//! looked for first ([`Device::find`]), and only functions of [`NEEDED`] are called.
#![allow(unsafe_code)] // the driver is C

use super::DeviceError;
use crate::kernel::backend::Unavailable;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, CString, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;

/// Every function that is called: what [`Device::find`] looks for.
const NEEDED: [&str; 28] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuLaunchKernel",
    "cuGetErrorName",
];

/// The driver must know the PTX that is shipped: version 8.0, of CUDA 12.0.
const OLDEST_VERSION: c_int = 12_000;
/// The oldest compute capability that the PTX is for.
const OLDEST_CAPABILITY: (c_int, c_int) = (7, 0);
/// `kernels.cu`, compiled; the driver translates it for its GPU.
const PTX: &str = include_str!("kernels.ptx");

/// What the driver calls an answer.
fn name_of(result: CUresult) -> String {
    let mut name = std::ptr::null();
    // SAFETY: `Device::find` saw the function; the name it gives is a constant text, or nothing.
    let known = unsafe { sys::cuGetErrorName(result, &mut name) } == CUresult::CUDA_SUCCESS;
    if known && !name.is_null() {
        // SAFETY: on success it points to a constant text that ends in a zero byte.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    } else {
        format!("error {}", result as u32)
    }
}

fn check(doing: &'static str, function: &str, result: CUresult) -> Result<(), DeviceError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(DeviceError {
        doing,
        found: format!("{} from {function}", name_of(result)),
    })
}

/// Calls a function of the driver and makes its answer a `Result`. Each use says why it is safe.
macro_rules! call {
    ($doing:expr, unsafe $function:ident ( $($argument:expr),* $(,)? )) => {{
        // SAFETY: said at each use.
        let answer = unsafe { sys::$function($($argument),*) };
        check($doing, stringify!($function), answer)
    }};
}

/// A kernel by its name, and how many blocks of it fill the GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    function: sys::CUfunction,
    threads: u32,
    /// Blocks that the GPU runs side by side.
    pub fills: u32,
}

/// The first GPU, its context, and the kernels loaded into it.
#[derive(Debug)]
pub(super) struct Device {
    context: sys::CUcontext,
    /// Bytes of shared memory that a block may have.
    pub shared_bytes: u32,
    pub sketch_f32: Kernel,
    pub patterns: Kernel,
    pub replay: Kernel,
    pub errors: Kernel,
    pub errors_in_order: Kernel,
}

// SAFETY: a context, its modules and functions may be used from any thread in which the context is current, and every function
// here that needs that makes it so.
unsafe impl Send for Device {}
// SAFETY: the driver's functions may be called from several threads at once.
unsafe impl Sync for Device {}

/// Shared memory of a block: `SKETCH_WORDS` of `kernels.cu`.
pub(super) const SKETCH_SHARED_BYTES: u32 = (2 * 5632 + 12) * 4;
/// Shared memory of a block that sums errors: 16 blocks, 4 scales, 2 sums, 16 lanes.
pub(super) const ERRORS_SHARED_BYTES: u32 = 16 * 4 * 2 * 16 * 8;
/// Shared memory that every GPU gives a block without being asked.
const ALWAYS_BYTES: u32 = 48 << 10;

impl Device {
    /// Asks for a driver, a GPU and room for the kernels. Whatever is missing, nothing panics.
    pub fn find() -> Result<Device, Unavailable> {
        let unavailable = |reason: String| Unavailable::new("cuda", reason);
        // SAFETY: loads the driver's library, whose initialisers are NVIDIA's and may run.
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable(no_driver()));
        }
        // SAFETY: as above; it was found, so this does not panic.
        let library = unsafe { sys::culib() };
        let missing = NEEDED.into_iter().find(|name| {
            let symbol = CString::new(*name).expect("a name without a zero byte");
            // SAFETY: nothing is called through it; only whether it is there is asked.
            unsafe { library.get::<*const c_void>(symbol.as_bytes_with_nul()) }.is_err()
        });
        if let Some(name) = missing {
            return Err(unavailable(format!(
                "found a CUDA driver without {name}, expected driver 525 (CUDA 12.0) or newer; update the NVIDIA driver"
            )));
        }
        const DOING: &str = "starting";
        let failed = |error: DeviceError| {
            let hint = if error.found.contains("NO_DEVICE") {
                "found a CUDA driver and no GPU, expected one; check nvidia-smi and CUDA_VISIBLE_DEVICES, and in a container --gpus".to_owned()
            } else if error.found.contains("STUB") {
                "found the CUDA toolkit's stub of libcuda, expected the driver's own; take the stubs off LD_LIBRARY_PATH".to_owned()
            } else {
                format!(
                    "found {}, expected a GPU that starts; check nvidia-smi",
                    error.found
                )
            };
            unavailable(hint)
        };
        let (mut version, mut count, mut device) = (0, 0, 0);
        let mut context = null_mut();
        // SAFETY: takes no pointer.
        call!(DOING, unsafe cuInit(0)).map_err(failed)?;
        // SAFETY: writes one integer.
        call!(DOING, unsafe cuDriverGetVersion(&mut version)).map_err(failed)?;
        if version < OLDEST_VERSION {
            return Err(unavailable(format!(
                "found a CUDA driver for version {}.{}, expected 12.0 or newer (driver 525); update the NVIDIA driver",
                version / 1000,
                version % 1000 / 10
            )));
        }
        // SAFETY: writes one integer.
        call!(DOING, unsafe cuDeviceGetCount(&mut count)).map_err(failed)?;
        if count < 1 {
            return Err(failed(DeviceError {
                doing: DOING,
                found: "CUDA_ERROR_NO_DEVICE".to_owned(),
            }));
        }
        // SAFETY: writes one integer.
        call!(DOING, unsafe cuDeviceGet(&mut device, 0)).map_err(failed)?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one integer.
            call!(DOING, unsafe cuDeviceGetAttribute(&mut value, which, device)).map_err(failed)?;
            Ok(value)
        };
        use sys::CUdevice_attribute as Attribute;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability < OLDEST_CAPABILITY {
            return Err(unavailable(format!(
                "found a GPU of compute capability {}.{}, expected 7.0 or newer",
                capability.0, capability.1
            )));
        }
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let shared_bytes = u32::try_from(shared).unwrap_or(0).max(ALWAYS_BYTES);
        // SAFETY: writes one handle. The context is kept until the process ends, as is this value.
        call!(DOING, unsafe cuDevicePrimaryCtxRetain(&mut context, device)).map_err(failed)?;
        // SAFETY: the context was just given.
        call!(DOING, unsafe cuCtxSetCurrent(context)).map_err(failed)?;
        let image = CString::new(PTX).expect("a text without a zero byte");
        let mut module = null_mut();
        // SAFETY: the image is text that ends in a zero byte; it is translated before the call returns.
        call!(DOING, unsafe cuModuleLoadData(&mut module, image.as_ptr().cast()))
            .map_err(failed)?;
        let kernel = |name: &str, threads: u32, shared_bytes: u32| {
            let mut function = null_mut();
            let symbol = CString::new(name).expect("a name without a zero byte");
            // SAFETY: the module was loaded above and the name ends in a zero byte.
            call!(DOING, unsafe cuModuleGetFunction(&mut function, module, symbol.as_ptr()))
                .map_err(failed)?;
            if shared_bytes > ALWAYS_BYTES {
                let most =
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function was found above.
                call!(DOING, unsafe cuFuncSetAttribute(function, most, shared_bytes as c_int))
                    .map_err(failed)?;
            }
            let mut side_by_side = 0;
            // SAFETY: writes one integer; the function was found above.
            call!(
                DOING,
                unsafe cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &mut side_by_side,
                    function,
                    threads as c_int,
                    shared_bytes as usize,
                )
            )
            .map_err(failed)?;
            let fills = u32::try_from(multiprocessors.saturating_mul(side_by_side)).unwrap_or(0);
            Ok(Kernel {
                function,
                threads,
                fills: fills.max(1),
            })
        };
        Ok(Device {
            context,
            shared_bytes,
            sketch_f32: kernel("gradscale_sketch_f32", 512, SKETCH_SHARED_BYTES)?,
            patterns: kernel("gradscale_patterns", 1024, pattern_window(shared_bytes) * 4)?,
            replay: kernel("gradscale_replay", 256, replay_shared_bytes(shared_bytes))?,
            errors: kernel("gradscale_errors", 256, ERRORS_SHARED_BYTES)?,
            errors_in_order: kernel("gradscale_errors_in_order", 256, 0)?,
        })
    }

    /// Makes the device's context that of this thread.
    pub fn enter(&self, doing: &'static str) -> Result<(), DeviceError> {
        // SAFETY: the context lives as long as the process.
        call!(doing, unsafe cuCtxSetCurrent(self.context))
    }
}

/// Magnitudes of 16-bit patterns that a block counts in one pass: the largest power of two that fits, at most all 32,768.
pub(super) fn pattern_window(shared_bytes: u32) -> u32 {
    let fits = (shared_bytes / 4).min(1 << 15);
    1 << fits.ilog2()
}

/// Shared memory that tables of intervals may take: half of what a block may have, so that two blocks run side by side.
pub(super) fn replay_shared_bytes(shared_bytes: u32) -> u32 {
    (shared_bytes / 2).max(ALWAYS_BYTES)
}

/// Why there is no CUDA here.
fn no_driver() -> String {
    // AMD's GPUs show up as this device.
    if Path::new("/dev/kfd").exists() {
        "found ROCm and no CUDA driver; there is no kernel for AMD's GPUs, and the CPU gives the same integers".to_owned()
    } else {
        "found no CUDA driver (libcuda.so.1), expected an NVIDIA GPU with driver 525 or newer; install the driver, or put its directory on LD_LIBRARY_PATH".to_owned()
    }
}

/// A queue of work on the device.
#[derive(Debug)]
pub(super) struct Stream {
    raw: sys::CUstream,
    device: &'static Device,
}

// SAFETY: a stream may be used from any thread in which its context is current, one at a time: the methods take care of the
// context, and there is no shared use without `Sync`.
unsafe impl Send for Stream {}

/// An argument of a kernel.
pub(super) type Argument<'a> = &'a dyn KernelArgument;

/// What can be passed to a kernel: plain integers and device addresses.
pub(super) trait KernelArgument {
    fn address(&self) -> *mut c_void;
}

impl KernelArgument for u32 {
    fn address(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

impl KernelArgument for u64 {
    fn address(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

impl KernelArgument for Buffer {
    fn address(&self) -> *mut c_void {
        std::ptr::from_ref(&self.at).cast_mut().cast()
    }
}

impl Stream {
    pub fn new(device: &'static Device) -> Result<Stream, DeviceError> {
        const DOING: &str = "making a stream";
        device.enter(DOING)?;
        let mut raw = null_mut();
        let apart = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        call!(DOING, unsafe cuStreamCreate(&mut raw, apart))?;
        Ok(Stream { raw, device })
    }

    /// Copies to the device. The bytes must stay as they are until the copy is done: hence only pinned ones, which are
    /// written again after an event.
    pub fn upload(&self, from: &Pinned, bytes: usize, to: &Buffer) -> Result<(), DeviceError> {
        assert!(
            bytes <= from.bytes && bytes <= to.bytes,
            "a copy inside both"
        );
        // SAFETY: both hold that many bytes. Whoever writes the pinned ones waits for the copy's event first, and both are
        // freed after the stream is done.
        call!("copying to", unsafe cuMemcpyHtoDAsync_v2(to.at, from.at.cast(), bytes, self.raw))
    }

    /// Copies to the device and waits for it.
    pub fn upload_now<T: Plain>(&self, from: &[T], to: &Buffer) -> Result<(), DeviceError> {
        let bytes = size_of_val(from);
        assert!(bytes <= to.bytes, "a copy inside the buffer");
        // SAFETY: both hold that many bytes, and the slice outlives the copy, as it is waited for.
        call!("copying to", unsafe cuMemcpyHtoDAsync_v2(to.at, from.as_ptr().cast(), bytes, self.raw))?;
        self.wait()
    }

    /// Copies from the device and waits for it and all before it.
    pub fn download<T: Plain>(&self, from: &Buffer, to: &mut [T]) -> Result<(), DeviceError> {
        let bytes = size_of_val(to);
        assert!(bytes <= from.bytes, "a copy inside the buffer");
        // SAFETY: both hold that many bytes, any bits are a value of a plain type, and the copy is waited for.
        call!("copying from", unsafe cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.at, bytes, self.raw))?;
        self.wait()
    }

    /// Sets all bytes to zero.
    pub fn clear(&self, buffer: &Buffer) -> Result<(), DeviceError> {
        // SAFETY: the buffer holds that many bytes.
        call!("clearing", unsafe cuMemsetD8Async(buffer.at, 0, buffer.bytes, self.raw))
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in number, order and type, and what they say of their buffers' lengths is true.
    pub unsafe fn launch(
        &self,
        kernel: Kernel,
        blocks: u32,
        shared_bytes: u32,
        arguments: &[Argument<'_>],
    ) -> Result<(), DeviceError> {
        let mut addresses: Vec<*mut c_void> = arguments.iter().map(|a| a.address()).collect();
        // SAFETY: the caller vouches for the arguments, which are read before the call returns.
        call!(
            "counting",
            unsafe cuLaunchKernel(
                kernel.function,
                blocks,
                1,
                1,
                kernel.threads,
                1,
                1,
                shared_bytes,
                self.raw,
                addresses.as_mut_ptr(),
                null_mut(),
            )
        )
    }

    /// What follows on this stream waits for `event`.
    pub fn wait_for(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive.
        call!("ordering work", unsafe cuStreamWaitEvent(self.raw, event.raw, 0))
    }

    /// Waits until everything on this stream is done.
    pub fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the handle is alive.
        call!("waiting for work", unsafe cuStreamSynchronize(self.raw))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // An error here is one that an earlier call has told of.
        let _ = self.device.enter("ending a stream");
        let _ = self.wait();
        // SAFETY: the handle is alive, and no longer afterwards.
        let _ = call!("ending a stream", unsafe cuStreamDestroy_v2(self.raw));
    }
}

/// A place in a stream's work.
#[derive(Debug)]
pub(super) struct Event {
    raw: sys::CUevent,
    device: &'static Device,
}

// SAFETY: as a stream's.
unsafe impl Send for Event {}

impl Event {
    pub fn new(device: &'static Device) -> Result<Event, DeviceError> {
        const DOING: &str = "making an event";
        device.enter(DOING)?;
        let mut raw = null_mut();
        let plain = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes one handle.
        call!(DOING, unsafe cuEventCreate(&mut raw, plain))?;
        Ok(Event { raw, device })
    }

    /// Stands for all that `stream` was given so far.
    pub fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive.
        call!("ordering work", unsafe cuEventRecord(self.raw, stream.raw))
    }

    /// Waits for it; one that was never recorded is there at once.
    pub fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the handle is alive.
        call!("waiting for work", unsafe cuEventSynchronize(self.raw))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.enter("ending an event");
        // SAFETY: the handle is alive, and no longer afterwards.
        let _ = call!("ending an event", unsafe cuEventDestroy_v2(self.raw));
    }
}

/// Device memory.
#[derive(Debug)]
pub(super) struct Buffer {
    at: sys::CUdeviceptr,
    bytes: usize,
    device: &'static Device,
}

impl Buffer {
    pub fn new(device: &'static Device, bytes: usize) -> Result<Buffer, DeviceError> {
        const DOING: &str = "taking memory";
        device.enter(DOING)?;
        let mut at = 0;
        // SAFETY: writes one address.
        call!(DOING, unsafe cuMemAlloc_v2(&mut at, bytes))?;
        Ok(Buffer { at, bytes, device })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.device.enter("giving memory back");
        // SAFETY: it was allocated in `new`. The driver waits for the work that uses it.
        let _ = call!("giving memory back", unsafe cuMemFree_v2(self.at));
    }
}

/// Host memory that the device copies from directly.
#[derive(Debug)]
pub(super) struct Pinned {
    at: *mut u8,
    bytes: usize,
    device: &'static Device,
}

// SAFETY: it owns its memory.
unsafe impl Send for Pinned {}

impl Pinned {
    pub fn new(device: &'static Device, bytes: usize) -> Result<Pinned, DeviceError> {
        const DOING: &str = "pinning memory";
        device.enter(DOING)?;
        let mut at = null_mut();
        // SAFETY: writes one address.
        call!(DOING, unsafe cuMemHostAlloc(&mut at, bytes, 0))?;
        // SAFETY: it holds that many bytes, and is given a value here.
        unsafe { at.cast::<u8>().write_bytes(0, bytes) };
        Ok(Pinned {
            at: at.cast(),
            bytes,
            device,
        })
    }

    /// Its bytes. No copy from them may be under way.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: it owns that many bytes, which `new` has given a value; the borrow is of `self`.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.enter("giving memory back");
        // SAFETY: it was allocated in `new`.
        let _ = call!("giving memory back", unsafe cuMemFreeHost(self.at.cast()));
    }
}

/// Types of which any bits are a value.
pub(super) trait Plain: Copy {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for f64 {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_over_patterns_fits_the_shared_memory_of_each_generation() {
        // H200, A100, Ada, Turing, and what is never less.
        let windows = [232_448, 166_912, 101_376, 65_536, 49_152].map(pattern_window);
        assert_eq!(windows, [32_768, 32_768, 16_384, 16_384, 8_192]);
    }

    #[test]
    fn the_ptx_has_every_kernel_and_is_for_the_oldest_gpu() {
        assert!(PTX.contains("\n.version 8.0\n") && PTX.contains("\n.target sm_70\n"));
        assert!(!PTX.contains('\0'));
    }
}

// A CUDA driver without a GPU: the functions of libcuda.so.1 that gradscale calls, over the same kernels.cu compiled for the host.
//
//     c++ -std=c++17 -O2 -ffp-contract=off -fPIC -shared -Wl,-soname,libcuda.so.1 shim.cpp -o libcuda.so.1
//
// A block's threads run one after another, each until it ends or reaches a barrier; then they go on from there. So the
// kernels' logic is tested, and their barriers, but no race: between two barriers there is only one order. Streams put
// everything off until somebody waits for it, so that a wait too few shows. Device memory ends at a page that nobody may touch,
// and a block's shared memory begins as garbage.
//
// By the environment: GRADSCALE_SHIM_SMS (multiprocessors, 3), GRADSCALE_SHIM_SHARED (bytes of shared memory a block may have,
// 232448), GRADSCALE_SHIM_FAIL (NAME or NAME:N: the N-th call of that function fails, and all later ones).

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

// ---- the language

#define __global__
#define __device__ static
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#pragma GCC diagnostic ignored "-Wunknown-pragmas"

struct Dim {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

static void die(const char *what) {
  std::fprintf(stderr, "cuda shim: %s\n", what);
  std::abort();
}

static void barrier();
static void __syncthreads() { barrier(); }

#define ATOMIC(name, type, result)                                                                                             \
  static type name(type *at, type x) {                                                                                         \
    type old = *at;                                                                                                            \
    *at = result;                                                                                                              \
    return old;                                                                                                                \
  }
typedef unsigned long long Wide;
ATOMIC(atomicAdd, unsigned, old + x)
ATOMIC(atomicAdd, Wide, old + x)
ATOMIC(atomicMax, int, old > x ? old : x)
ATOMIC(atomicMin, int, old < x ? old : x)
ATOMIC(atomicOr, int, old | x)
ATOMIC(atomicSub, unsigned, old - x)
ATOMIC(atomicMax, unsigned, old > x ? old : x)
ATOMIC(atomicMax, Wide, old > x ? old : x)
ATOMIC(atomicMin, unsigned, old < x ? old : x)
ATOMIC(atomicMin, Wide, old < x ? old : x)
ATOMIC(atomicMin, long long, old < x ? old : x)
ATOMIC(atomicOr, unsigned, old | x)
ATOMIC(atomicOr, Wide, old | x)

static int __ffs(int x) { return __builtin_ffs(x); }
static int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
template <class To, class From> static To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static long long __double_as_longlong(double x) { return bits_as<long long>(x); }
static double __longlong_as_double(long long x) { return bits_as<double>(x); }
static uint4 __ldcs(const uint4 *from) {
  if ((uintptr_t)from % 16) die("16 bytes are loaded from an address that 16 does not divide");
  return *from;
}

#include "../../src/kernel/cuda/kernels.cu"

static const unsigned SHARED_BYTES = 256 << 10;
__align__(16) u32 shared[SHARED_BYTES / 4];

// ---- a block's threads

// Each lives on as long as the process and runs one thread of block after block. It is entered by makecontext once; later
// switches are jumps, which ask nothing of the kernel.
static const size_t STACK = 64 << 10;
struct Fiber {
  ucontext_t context;
  jmp_buf here;
  bool begun = false, ended = false;
};
static ucontext_t first_return;
static jmp_buf scheduler;
static std::deque<Fiber> fibers;
static Fiber *running;
static const std::function<void()> *body;

static void leave_fiber() {
  if (!_setjmp(running->here)) _longjmp(scheduler, 1);
}
static void barrier() { leave_fiber(); }

static void live() {
  for (;;) {
    (*body)();
    running->ended = true;
    leave_fiber();
  }
}

static void enter_fiber(Fiber *fiber) {
  running = fiber;
  if (_setjmp(scheduler)) return;
  if (fiber->begun) _longjmp(fiber->here, 1);
  fiber->begun = true;
  swapcontext(&first_return, &fiber->context);
}

static void run_block(unsigned threads) {
  while (fibers.size() < threads) {
    fibers.emplace_back();
    Fiber &fiber = fibers.back();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = std::malloc(STACK);
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = &first_return;
    makecontext(&fiber.context, live, 0);
  }
  for (unsigned t = 0; t < threads; t++) fibers[t].ended = false;
  for (bool some = true; some;) {
    some = false;
    unsigned ended = 0;
    for (unsigned t = 0; t < threads; t++) {
      if (!fibers[t].ended) {
        threadIdx.x = t;
        enter_fiber(&fibers[t]);
        some |= !fibers[t].ended;
      }
      ended += fibers[t].ended;
    }
    if (some && ended) die("some threads of a block wait at a barrier that others have not passed");
  }
}

static void run_grid(unsigned blocks, unsigned threads, unsigned shared_bytes, const std::function<void()> &call) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  if (threads > 1024 || blocks == 0 || shared_bytes > SHARED_BYTES) die("a launch with impossible dimensions");
  gridDim = {blocks, 1, 1};
  blockDim = {threads, 1, 1};
  threadIdx = {0, 0, 0};
  body = &call;
  for (unsigned b = 0; b < blocks; b++) {
    blockIdx = {b, 0, 0};
    // A page more than it was given, to see whether it writes there.
    size_t given = shared_bytes / 4, watched = given + 1024 < SHARED_BYTES / 4 ? given + 1024 : SHARED_BYTES / 4;
    std::memset(shared, 0xA5, watched * 4);
    run_block(threads);
    for (size_t i = given; i < watched; i++)
      if (shared[i] != 0xA5A5A5A5u) die("a block wrote beyond its shared memory");
  }
}

// ---- kernels by name

typedef std::function<void(void **)> Kernel; // reads its arguments now, and is run later

template <class... A, size_t... I>
static std::function<void()> bound(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
  std::tuple<A...> copied(*(A *)arguments[I]...);
  return [=] { std::apply(kernel, copied); };
}

struct Entry {
  const char *name;
  std::function<std::function<void()>(void **)> bind;
};
template <class... A> static Entry entry(const char *name, void (*kernel)(A...)) {
  return {name, [=](void **arguments) { return bound(kernel, arguments, std::index_sequence_for<A...>()); }};
}
#define KERNEL(name) entry(#name, name)
static Entry entries[] = {
    KERNEL(gradscale_sketch_f32), KERNEL(gradscale_sketch_f16),         KERNEL(gradscale_sketch_bf16),
    KERNEL(gradscale_patterns),   KERNEL(gradscale_patterns_to_sketch), KERNEL(gradscale_replay),
    KERNEL(gradscale_errors),     KERNEL(gradscale_errors_in_order),    KERNEL(gradscale_extremes),
};

// ---- streams and events

typedef int Result;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, LAUNCH_FAILED = 719 };

static std::recursive_mutex api;
#define ENTER(name)                                                                                                            \
  std::lock_guard<std::recursive_mutex> lock(api);                                                                             \
  if (fails(#name)) return LAUNCH_FAILED

static bool fails(const char *name) {
  static const char *wanted = std::getenv("GRADSCALE_SHIM_FAIL");
  if (!wanted) return false;
  std::string text = wanted;
  size_t colon = text.find(':');
  if (text.substr(0, colon) != name) return false;
  static long calls = 0;
  return ++calls >= (colon == std::string::npos ? 1 : std::atol(text.c_str() + colon + 1));
}

struct Stream {
  std::deque<std::function<void()>> later;
};
struct Event {
  Stream *stream = nullptr;
  unsigned long recorded = 0, reached = 0;
};

static void drain(Stream *stream) {
  while (!stream->later.empty()) {
    auto now = std::move(stream->later.front());
    stream->later.pop_front();
    now();
  }
}
static void reach(Event *event, unsigned long generation) {
  while (event->reached < generation) {
    if (event->stream->later.empty()) die("an event that is waited for never comes");
    auto now = std::move(event->stream->later.front());
    event->stream->later.pop_front();
    now();
  }
}
// Without a stream it is done at once: callers that have none share memory with the host.
static void put(void *stream, std::function<void()> what) {
  if (stream) ((Stream *)stream)->later.push_back(std::move(what));
  else what();
}

// ---- memory

static std::map<void *, size_t> taken;
static std::multimap<size_t, void *> given_back; // used again, with what they hold
static void *allocate(size_t bytes) {
  auto old = given_back.find(bytes);
  if (old != given_back.end()) {
    void *at = old->second;
    given_back.erase(old);
    taken[at] = bytes;
    return at;
  }
  size_t page = 4096, rounded = (bytes + 255) / 256 * 256, whole = (rounded + page - 1) / page * page;
  char *start = (char *)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  mprotect(start + whole, page, PROT_NONE);
  char *at = start + whole - rounded;
  std::memset(at, 0xA5, rounded);
  taken[at] = bytes;
  return at;
}
static Result release(void *at) {
  auto found = taken.find(at);
  if (found == taken.end()) return INVALID_VALUE;
  given_back.emplace(found->second, at);
  taken.erase(found);
  return SUCCESS;
}

static int from_environment(const char *name, int otherwise) {
  const char *text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

// ---- the driver

extern "C" {
Result cuInit(unsigned) {
  ENTER(cuInit);
  return SUCCESS;
}
Result cuDriverGetVersion(int *version) {
  ENTER(cuDriverGetVersion);
  *version = from_environment("GRADSCALE_SHIM_VERSION", 12000);
  return SUCCESS;
}
Result cuDeviceGetCount(int *count) {
  ENTER(cuDeviceGetCount);
  *count = 1;
  return SUCCESS;
}
Result cuDeviceGet(int *device, int ordinal) {
  ENTER(cuDeviceGet);
  *device = ordinal;
  return ordinal == 0 ? SUCCESS : INVALID_VALUE;
}
Result cuDeviceGetName(char *name, int length, int) {
  ENTER(cuDeviceGetName);
  std::snprintf(name, (size_t)length, "host shim");
  return SUCCESS;
}
Result cuDeviceGetAttribute(int *value, int attribute, int) {
  ENTER(cuDeviceGetAttribute);
  switch (attribute) {
  case 16: *value = from_environment("GRADSCALE_SHIM_SMS", 3); return SUCCESS;
  case 75: *value = 7; return SUCCESS;
  case 76: *value = 0; return SUCCESS;
  case 97: *value = from_environment("GRADSCALE_SHIM_SHARED", 232448); return SUCCESS;
  default: return INVALID_VALUE;
  }
}
Result cuDevicePrimaryCtxRetain(void **context, int) {
  ENTER(cuDevicePrimaryCtxRetain);
  static int one;
  *context = &one;
  return SUCCESS;
}
Result cuCtxSetCurrent(void *) {
  ENTER(cuCtxSetCurrent);
  return SUCCESS;
}
Result cuCtxGetCurrent(void **context) {
  ENTER(cuCtxGetCurrent);
  static int one;
  *context = &one;
  return SUCCESS;
}
Result cuModuleLoadData(void **module, const void *image) {
  ENTER(cuModuleLoadData);
  if (!std::strstr((const char *)image, ".target sm_70")) return INVALID_VALUE;
  *module = new std::string((const char *)image);
  return SUCCESS;
}
Result cuModuleGetFunction(void **function, void *module, const char *name) {
  ENTER(cuModuleGetFunction);
  // The real one looks into the module; the host's code is used, but what is asked for has to be there.
  if (((std::string *)module)->find(".entry " + std::string(name) + "(") == std::string::npos) return NOT_FOUND;
  for (Entry &entry : entries)
    if (!std::strcmp(entry.name, name)) {
      *function = &entry;
      return SUCCESS;
    }
  return NOT_FOUND;
}
Result cuFuncSetAttribute(void *, int, int value) {
  ENTER(cuFuncSetAttribute);
  return value <= from_environment("GRADSCALE_SHIM_SHARED", 232448) ? SUCCESS : INVALID_VALUE;
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *, int, size_t) {
  ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor);
  *blocks = 1;
  return SUCCESS;
}
Result cuMemAlloc_v2(uintptr_t *at, size_t bytes) {
  ENTER(cuMemAlloc_v2);
  *at = (uintptr_t)allocate(bytes);
  return *at ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemFree_v2(uintptr_t at) {
  ENTER(cuMemFree_v2);
  return release((void *)at);
}
Result cuMemHostAlloc(void **at, size_t bytes, unsigned) {
  ENTER(cuMemHostAlloc);
  *at = allocate(bytes);
  return *at ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemFreeHost(void *at) {
  ENTER(cuMemFreeHost);
  return release(at);
}
Result cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, void *stream) {
  ENTER(cuMemcpyHtoDAsync_v2);
  put(stream, [=] { std::memcpy((void *)to, from, bytes); });
  return SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *stream) {
  ENTER(cuMemcpyDtoHAsync_v2);
  put(stream, [=] { std::memcpy(to, (const void *)from, bytes); });
  return SUCCESS;
}
Result cuMemsetD8Async(uintptr_t at, unsigned char byte, size_t bytes, void *stream) {
  ENTER(cuMemsetD8Async);
  put(stream, [=] { std::memset((void *)at, byte, bytes); });
  return SUCCESS;
}
Result cuStreamCreate(void **stream, unsigned) {
  ENTER(cuStreamCreate);
  *stream = new Stream;
  return SUCCESS;
}
Result cuStreamDestroy_v2(void *stream) {
  ENTER(cuStreamDestroy_v2);
  drain((Stream *)stream);
  delete (Stream *)stream;
  return SUCCESS;
}
Result cuStreamSynchronize(void *stream) {
  ENTER(cuStreamSynchronize);
  if (stream) drain((Stream *)stream);
  return SUCCESS;
}
Result cuStreamWaitEvent(void *stream, void *event, unsigned) {
  ENTER(cuStreamWaitEvent);
  unsigned long generation = ((Event *)event)->recorded;
  put(stream, [=] { reach((Event *)event, generation); });
  return SUCCESS;
}
Result cuEventCreate(void **event, unsigned) {
  ENTER(cuEventCreate);
  *event = new Event;
  return SUCCESS;
}
Result cuEventRecord(void *event, void *stream) {
  ENTER(cuEventRecord);
  Event *mine = (Event *)event;
  unsigned long generation = ++mine->recorded;
  mine->stream = (Stream *)stream;
  put(stream, [=] { mine->reached = generation; });
  return SUCCESS;
}
Result cuEventSynchronize(void *event) {
  ENTER(cuEventSynchronize);
  reach((Event *)event, ((Event *)event)->recorded);
  return SUCCESS;
}
Result cuEventDestroy_v2(void *event) {
  ENTER(cuEventDestroy_v2);
  delete (Event *)event;
  return SUCCESS;
}
Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared_bytes, void *stream, void **arguments, void **) {
  ENTER(cuLaunchKernel);
  if (gy != 1 || gz != 1 || by != 1 || bz != 1) return INVALID_VALUE;
  std::function<void()> call = ((Entry *)function)->bind(arguments);
  put(stream, [=] { run_grid(gx, bx, shared_bytes, call); });
  return SUCCESS;
}
Result cuGetErrorName(int code, const char **name) {
  *name = code == OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == NOT_FOUND     ? "CUDA_ERROR_NOT_FOUND"
          : code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                  : "CUDA_ERROR_INVALID_VALUE";
  return SUCCESS;
}
}

//! The CUDA backend where there is no GPU: its kernels on the host, and every way in which it can be missing.
//!
//! `tests/cuda_shim` is a driver whose kernels are compiled for the host. It needs a C++ compiler; with
//! `GRADSCALE_NEED_BACKENDS=cuda-shim` set, its absence is a failure and no skip. With a real driver on the machine the tests
//! of a missing one are skipped.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Says that a test is skipped, or fails where it must not be.
fn skip(why: &str) {
    let needed = std::env::var("GRADSCALE_NEED_BACKENDS").unwrap_or_default();
    assert!(
        !needed.split(',').any(|need| need == "cuda-shim"),
        "the shim of CUDA is needed here: {why}"
    );
    eprintln!("SKIPPED: the shim of CUDA: {why}");
}

/// Compiles a `libcuda.so.1` into a directory of its own, or says why not.
fn compile(compiler: &str, arguments: &[&str], source: &Path) -> Option<tempfile::TempDir> {
    if cfg!(not(target_os = "linux")) {
        skip("it is a library of Linux");
        return None;
    }
    let folder = tempfile::tempdir().expect("a temporary directory");
    let output = Command::new(compiler)
        .args(arguments)
        .args(["-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(folder.path().join("libcuda.so.1"))
        .arg(source)
        .output();
    match output {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{compiler} refuses it: {said}");
            Some(folder)
        }
        Err(error) => {
            skip(&format!("{compiler} cannot be run ({error})"));
            None
        }
    }
}

fn shim() -> Option<tempfile::TempDir> {
    let source = root().join("tests/cuda_shim/shim.cpp");
    let plain = ["-std=c++17", "-O2", "-ffp-contract=off", "-w"];
    compile("c++", &plain, &source)
}

/// A driver that answers `init` to the first call; `names` are the functions it has.
fn driver_of_nothing<'a>(
    names: impl Iterator<Item = &'a str>,
    init: u32,
    name: &str,
) -> Option<tempfile::TempDir> {
    let mut source = format!(
        "int cuGetErrorName(int code, const char **name) {{ *name = \"{name}\"; return 0; }}\nint cuInit(unsigned flags) {{ return {init}; }}\n"
    );
    for name in names.filter(|name| !["cuGetErrorName", "cuInit"].contains(name)) {
        source.push_str(&format!("int {name}(void) {{ return 3; }}\n"));
    }
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = folder.path().join("driver.c");
    std::fs::write(&path, source).expect("it can be written");
    compile("cc", &["-w"], &path)
}

/// The driver's functions that are called.
fn needed() -> Vec<&'static str> {
    let source = include_str!("../../src/kernel/cuda/driver.rs");
    let list = source
        .split("const NEEDED")
        .nth(1)
        .expect("there is the list");
    let list = list.split("];").next().expect("it ends");
    list.split('"')
        .filter(|name| name.starts_with("cu"))
        .collect()
}

#[test]
fn every_function_of_the_driver_that_is_called_is_looked_for_first() {
    let source = include_str!("../../src/kernel/cuda/driver.rs");
    let called = source
        .split("unsafe cu")
        .skip(1)
        .map(|rest| format!("cu{}", rest.split('(').next().expect("a call")));
    let mut called: Vec<String> = called.collect();
    called.push("cuGetErrorName".to_owned());
    called.sort();
    called.dedup();
    let mut needed = needed();
    needed.sort_unstable();
    assert_eq!(called, needed);
}

#[cfg(feature = "cli")]
fn analyze<'a>(
    driver: Option<&Path>,
    backend: &str,
    more: &[&str],
    environment: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gradscale"));
    command
        .args([
            "analyze",
            "tests/data/dumps/npy/f32.npy",
            "--json",
            "--backend",
            backend,
        ])
        .args(more)
        .current_dir(root())
        .env(
            "LD_LIBRARY_PATH",
            driver.map_or(OsStr::new(""), Path::as_os_str),
        )
        .envs(environment);
    command.output().expect("the program runs")
}

/// The one line that a refusal is.
#[cfg(feature = "cli")]
fn refusal(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty());
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains("gives the same integers") || said.contains("all give the same integers"),
        "{said}"
    );
    said
}

/// Whether this machine has a driver of its own, which would be found instead of ours, or could not be hidden.
#[cfg(feature = "cli")]
fn has_a_driver() -> bool {
    let found = Command::new("sh")
        .args(["-c", "ldconfig -p 2>/dev/null | grep -q 'libcuda\\.so'"])
        .status();
    let has = found.is_ok_and(|status| status.success());
    if has {
        skip("this machine has a CUDA driver, which cannot be hidden");
    }
    has
}

#[cfg(feature = "cli")]
#[test]
fn without_a_driver_cuda_is_refused_in_one_line_and_auto_takes_the_cpu() {
    if has_a_driver() {
        return;
    }
    let said = refusal(&analyze(None, "cuda", &[], []));
    let expected = if Path::new("/dev/kfd").exists() {
        "ROCm"
    } else {
        "no CUDA driver"
    };
    assert!(said.contains(expected), "{said}");
    let auto = analyze(None, "auto", &[], []);
    assert_eq!(auto.status.code(), Some(0));
    assert!(
        auto.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&auto.stderr)
    );
}

#[cfg(feature = "cli")]
#[test]
fn a_driver_that_lacks_functions_has_no_gpu_or_is_a_stub_is_refused_in_one_line() {
    if has_a_driver() {
        return;
    }
    let lacks: Vec<&str> = needed()
        .into_iter()
        .filter(|name| *name != "cuMemsetD8Async")
        .collect();
    let cases = [
        (vec![], 0, "", "without cuDriverGetVersion"),
        (lacks, 0, "", "without cuMemsetD8Async"),
        (needed(), 100, "CUDA_ERROR_NO_DEVICE", "no GPU"),
        (needed(), 34, "CUDA_ERROR_STUB_LIBRARY", "stub"),
        (
            needed(),
            803,
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH from cuInit",
        ),
    ];
    for (names, init, name, says) in cases {
        let Some(driver) = driver_of_nothing(names.into_iter(), init, name) else {
            return;
        };
        let said = refusal(&analyze(Some(driver.path()), "cuda", &[], []));
        assert!(said.contains(says), "{said}");
        let auto = analyze(Some(driver.path()), "auto", &[], []);
        assert_eq!(auto.status.code(), Some(0));
        assert!(
            auto.stderr.is_empty(),
            "{}",
            String::from_utf8_lossy(&auto.stderr)
        );
    }
}

#[cfg(feature = "cli")]
#[test]
fn a_gpu_that_fails_at_any_call_is_an_error_of_one_line() {
    let Some(driver) = shim() else {
        return;
    };
    let path = Some(driver.path());
    let whole = analyze(path, "cuda", &["--errors"], []);
    assert_eq!(
        whole.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&whole.stderr)
    );
    assert!(String::from_utf8_lossy(&whole.stdout).contains("\"backend\": \"cuda\""));
    for name in needed() {
        // Those that tell of errors, and those that end things, whose failure loses nothing.
        if name == "cuGetErrorName" || name.contains("Free") || name.contains("Destroy") {
            continue;
        }
        let output = analyze(path, "cuda", &["--errors"], [("GRADSCALE_SHIM_FAIL", name)]);
        let said = refusal(&output);
        assert!(said.contains(name), "{name}: {said}");
    }
    let old = analyze(path, "cuda", &[], [("GRADSCALE_SHIM_VERSION", "11040")]);
    assert!(refusal(&old).contains("version 11.4"));
}

#[test]
fn the_kernels_pass_every_test_here_on_the_host() {
    let Some(driver) = shim() else {
        return;
    };
    // Multiprocessors, and bytes of shared memory: one block and many, one pass over the patterns and several.
    for (multiprocessors, shared) in [("3", "232448"), ("1", "49152"), ("40", "101376")] {
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args(["--test-threads", "2", "--skip", "cuda::"])
            .current_dir(root())
            .env("LD_LIBRARY_PATH", driver.path())
            .env("GRADSCALE_NEED_BACKENDS", "cuda")
            .env("GRADSCALE_SHIM_SMS", multiprocessors)
            .env("GRADSCALE_SHIM_SHARED", shared)
            .output()
            .expect("this program runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let more = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success(),
            "{multiprocessors} multiprocessors, {shared} bytes:\n{said}{more}"
        );
    }
}

#[test]
fn the_shim_was_really_asked() {
    // A shim that fails must be seen: otherwise the tests above could have counted on the CPU.
    let Some(driver) = shim() else {
        return;
    };
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["any_length_counts_as_one_by_one", "--exact"])
        .current_dir(root())
        .env("LD_LIBRARY_PATH", driver.path())
        .env("GRADSCALE_NEED_BACKENDS", "cuda")
        .env("GRADSCALE_SHIM_FAIL", "cuLaunchKernel:5")
        .output()
        .expect("this program runs");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("cuLaunchKernel"));
}

/// Where the two copies of the compiled kernels lie: the program's and the recorder's.
fn ptx() -> [PathBuf; 2] {
    [
        "src/kernel/cuda/kernels.ptx",
        "python/gradscale/kernels.ptx",
    ]
    .map(|path| root().join(path))
}

#[test]
fn the_recorder_carries_the_same_kernels() {
    let [ours, theirs] = ptx().map(|path| std::fs::read(path).expect("it is committed"));
    assert!(
        ours == theirs,
        "copy src/kernel/cuda/kernels.ptx to python/gradscale/"
    );
}

//! Which code counts: a value that can't be held unless this machine can run it.

use super::avx2::Avx2;
use super::avx512::Avx512;
use super::cuda::Cuda;

/// A kernel that this machine can run.
///
/// It is made by asking the machine once; whoever holds it may call it. All of them give the same integers, and the
/// same floats where floats are summed.
///
/// # Examples
/// ```
/// use gradscale::kernel::Backend;
/// assert_eq!(Backend::parse("scalar")?.name(), "scalar");
/// assert!(Backend::parse("abacus").is_err());
/// # Ok::<(), gradscale::kernel::Unavailable>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backend(pub(super) Which);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Scalar,
    Avx2(Avx2),
    Avx512(Avx512),
    Cuda(Cuda),
}

/// Why a backend cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Unavailable {
    /// The name asked for.
    pub name: String,
    /// What is missing.
    pub reason: String,
}

impl Unavailable {
    pub(super) fn new(name: &str, reason: impl Into<String>) -> Unavailable {
        Unavailable {
            name: name.to_owned(),
            reason: reason.into(),
        }
    }
}

impl Backend {
    /// The names that [`parse`](Backend::parse) knows.
    pub const NAMES: [&'static str; 6] = ["auto", "cpu", "scalar", "avx2", "avx512", "cuda"];

    /// The fastest that this machine's CPU can run.
    ///
    /// Never `cuda`: what lies in host memory would have to cross a bus that is slower than counting where it lies. For
    /// gradients that lie on a GPU there is the recorder, which counts them there.
    pub fn auto() -> Backend {
        Avx512::new()
            .map(Which::Avx512)
            .or_else(|_| Avx2::new().map(Which::Avx2))
            .map_or(Backend::scalar(), Backend)
    }

    /// The portable one.
    pub fn scalar() -> Backend {
        Backend(Which::Scalar)
    }

    /// Every one that this machine can run, the portable one first, then the CPU's fastest last but for a GPU.
    pub fn available() -> Vec<Backend> {
        ["scalar", "avx2", "avx512", "cuda"]
            .into_iter()
            .filter_map(|name| Backend::parse(name).ok())
            .collect()
    }

    /// Finds a backend by its name. `auto` and `cpu` take the fastest of the CPU's; `cuda` looks for a GPU.
    ///
    /// # Errors
    /// When no backend has that name, or this machine or build has not what it needs.
    pub fn parse(name: &str) -> Result<Backend, Unavailable> {
        match name {
            "auto" | "cpu" => Ok(Backend::auto()),
            "scalar" => Ok(Backend::scalar()),
            "avx2" => Avx2::new().map(|found| Backend(Which::Avx2(found))),
            "avx512" => Avx512::new().map(|found| Backend(Which::Avx512(found))),
            "cuda" => Cuda::new().map(|found| Backend(Which::Cuda(found))),
            _ => Err(Unavailable::new(
                name,
                format!(
                    "there is no such backend, expected one of {}",
                    Backend::NAMES.join(", ")
                ),
            )),
        }
    }

    /// Its own name: `scalar`, `avx2`, `avx512` or `cuda`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Which::Scalar => "scalar",
            Which::Avx2(_) => "avx2",
            Which::Avx512(_) => "avx512",
            Which::Cuda(_) => "cuda",
        }
    }
}

impl Default for Backend {
    fn default() -> Backend {
        Backend::auto()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_had_or_says_why_not() {
        for name in Backend::NAMES {
            match Backend::parse(name) {
                Ok(backend) if ["auto", "cpu"].contains(&name) => {
                    assert_eq!(backend, Backend::auto());
                }
                Ok(backend) => assert_eq!(backend.name(), name),
                Err(unavailable) => {
                    assert_eq!(unavailable.name, name);
                    assert!(!unavailable.reason.is_empty());
                }
            }
        }
        let message = Backend::parse("abacus").unwrap_err().to_string();
        assert!(message.contains("avx512"), "{message}");
    }

    #[test]
    fn auto_is_the_last_of_the_cpus() {
        let mut available = Backend::available();
        available.retain(|backend| backend.name() != "cuda");
        assert_eq!(available.last(), Some(&Backend::auto()));
    }
}

//! What of a dump is read, and how its files are told apart.

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::{GradientsError, StepPattern};

/// The loss scale that a dump's values were multiplied by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum DumpScale {
    /// None, or not known: values are taken as they are.
    #[default]
    None,
    /// This one; positive and finite.
    Value(f64),
    /// The file says: metadata `loss_scale`, or the `scaler` entry of a `.pt`.
    Auto,
}

/// Which tensors are read, and how steps and ranks are found.
///
/// # Examples
///
/// ```
/// let options = gradscale::gradients::Options::new()
///     .with_tensors(["layer*.weight"])?
///     .with_exclude(["*.embed.*"])?;
/// assert!(options.selects("layer3.attn.weight"));
/// assert!(!options.selects("layer3.bias"));
/// # Ok::<(), gradscale::gradients::GradientsError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Options {
    tensors: Option<GlobSet>,
    exclude: Option<GlobSet>,
    step_pattern: Option<StepPattern>,
    mmap: bool,
    dump_scale: DumpScale,
}

impl Options {
    /// Everything, with steps and ranks by the usual names.
    pub fn new() -> Options {
        Options::default()
    }

    /// Only tensors whose name fits one of these globs (`*` also crosses dots and slashes).
    ///
    /// # Errors
    ///
    /// A glob that does not parse.
    pub fn with_tensors<S: AsRef<str>>(
        mut self,
        globs: impl IntoIterator<Item = S>,
    ) -> Result<Options, GradientsError> {
        self.tensors = glob_set(globs)?;
        Ok(self)
    }

    /// No tensor whose name fits one of these globs.
    ///
    /// # Errors
    ///
    /// A glob that does not parse.
    pub fn with_exclude<S: AsRef<str>>(
        mut self,
        globs: impl IntoIterator<Item = S>,
    ) -> Result<Options, GradientsError> {
        self.exclude = glob_set(globs)?;
        Ok(self)
    }

    /// Steps and ranks by this pattern instead of the usual names.
    pub fn with_step_pattern(mut self, pattern: StepPattern) -> Options {
        self.step_pattern = Some(pattern);
        self
    }

    /// Maps files into memory instead of reading them in blocks.
    ///
    /// Worth it only where it was measured to be faster: a mapped file that another process shortens meanwhile ends
    /// this process with a signal, where a read ends in an error.
    pub fn with_mmap(mut self, mmap: bool) -> Options {
        self.mmap = mmap;
        self
    }

    /// The loss scale that the values carry.
    ///
    /// # Errors
    ///
    /// A value that is not positive and finite.
    pub fn with_dump_scale(mut self, dump_scale: DumpScale) -> Result<Options, GradientsError> {
        if let DumpScale::Value(scale) = dump_scale
            && !(scale.is_finite() && scale > 0.0)
        {
            return Err(GradientsError::DumpScale {
                found: scale.to_string(),
            });
        }
        self.dump_scale = dump_scale;
        Ok(self)
    }

    /// Whether a tensor of this name is read.
    pub fn selects(&self, name: &str) -> bool {
        self.tensors
            .as_ref()
            .is_none_or(|globs| globs.is_match(name))
            && !self
                .exclude
                .as_ref()
                .is_some_and(|globs| globs.is_match(name))
    }

    /// Whether globs say which tensors are read.
    pub fn chooses(&self) -> bool {
        self.tensors.is_some()
    }

    /// The step pattern, where one was given.
    pub fn step_pattern(&self) -> Option<&StepPattern> {
        self.step_pattern.as_ref()
    }

    /// Whether files are mapped.
    pub fn mmap(&self) -> bool {
        self.mmap
    }

    /// The loss scale that the values carry.
    pub fn dump_scale(&self) -> DumpScale {
        self.dump_scale
    }
}

/// `None` for no globs at all.
fn glob_set<S: AsRef<str>>(
    globs: impl IntoIterator<Item = S>,
) -> Result<Option<GlobSet>, GradientsError> {
    let mut set = GlobSetBuilder::new();
    let mut any = false;
    let bad = |glob: &str, e: globset::Error| GradientsError::Glob {
        glob: glob.to_string(),
        found: e.kind().to_string(),
    };
    for glob in globs {
        let glob = glob.as_ref();
        set.add(
            GlobBuilder::new(glob)
                .literal_separator(false)
                .build()
                .map_err(|e| bad(glob, e))?,
        );
        any = true;
    }
    if !any {
        return Ok(None);
    }
    set.build().map(Some).map_err(|e| bad("", e))
}

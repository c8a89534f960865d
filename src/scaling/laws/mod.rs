//! Laws: what every loss scaler keeps, and the search for a history that breaks one.
//!
//! ```text
//!  strategies --> history of found_inf --> subject (a policy, your scaler, a program) --> scales, skips
//!                      ^                                                                       |
//!                      |  smaller and smaller while it still breaks                            v
//!                      '------------------------ counterexample <-- broken <------------ one law at a time
//! ```
//!
//! Each law is documented with the real bug that it guards against, in [`LAWS`]. How long a clean stretch brings growth, how many
//! overflows bring backoff, floor and ceiling are learnt from the subject before the search (or given, in [`Options`]), so that
//! a scaler with an interval of 20 and one of 2000 are held to the same laws.
//!
//! A scaler that breaks a law on purpose *declares* it, with a reason. A declared exception is tested too: where
//! the law holds after all, the declaration is the error.
//!
//! From your own test: implement [`Policy`] for your scaler and call [`check_policy`].
//!
//! ```
//! use gradscale::scaling::laws::{Options, check_policy};
//! use gradscale::scaling::policy::{Defaults, PolicySpec};
//!
//! let spec = PolicySpec::parse("tf-keras:growth_interval=8")?;
//! let build = || spec.build(Defaults::Class).expect("a parsed spec builds");
//! let report = check_policy(build, &Options { cases: 20, ..Options::default() });
//! assert!(report.passed(), "{report}");
//! # Ok::<(), gradscale::scaling::policy::PolicyError>(())
//! ```

use std::fmt;

use super::policy::{Policy, PolicySpec};

mod facts;
mod history;
mod rules;
mod search;
mod subject;

pub use facts::Facts;
pub use history::{Case, HistoryError};
pub use rules::{LAWS, Law};
pub use subject::{Failure, PolicySubject, Step, Subject};

/// The property that fails where a program dies, hangs or answers nonsense.
pub const ANSWERS: &str = "answers";
/// The law that holds only beside a reference policy.
pub const SAME_AS_POLICY: &str = "same_as_policy";

/// What is known of the growth interval beforehand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Interval {
    /// Nothing: it is learnt from the first clean stretch.
    #[default]
    Learnt,
    /// Growth comes with exactly this many clean steps.
    Exactly(u64),
    /// Growth comes with this many clean steps or one more: both are in use (DeepSpeed and Flax need W + 1).
    OrOneMore(u64),
    /// It is not to grow, or not within the steps that are tried.
    Never,
}

/// A law that the subject is known to break.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excuse {
    /// The law's name.
    pub law: String,
    /// Why.
    pub reason: String,
    /// What if the search finds that the law holds.
    pub when_kept: WhenKept,
}

/// What an [`Excuse`] comes to where the law is kept after all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenKept {
    /// The declaration is wrong, and the property fails.
    Fail,
    /// The property passes, with a note: the exception belongs to another configuration.
    Note,
    /// The law is not tried at all.
    NotTried,
}

/// How to search.
#[derive(Debug, Clone)]
pub struct Options {
    /// Histories tried for each law.
    pub cases: u32,
    /// Seed of the search: the same seed tries the same histories.
    pub seed: u64,
    /// The growth interval, where known.
    pub interval: Interval,
    /// How many overflows in a row bring backoff, where known.
    pub hysteresis: Option<u64>,
    /// A policy that the subject must equal, step by step.
    pub reference: Option<PolicySpec>,
    /// Declared exceptions.
    pub excuses: Vec<Excuse>,
    /// Try this one history instead of searching.
    pub replay: Option<Case>,
    /// The longest clean stretch that is tried; a growth interval beyond it stays unseen.
    pub reach: usize,
    /// The longest drive to the ceiling.
    pub drive: usize,
    /// How many smaller histories are tried to simplify a counterexample.
    pub shrinks: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            cases: 256,
            seed: 0,
            interval: Interval::Learnt,
            hysteresis: None,
            reference: None,
            excuses: Vec::new(),
            replay: None,
            reach: 40_000,
            drive: 2_500_000,
            shrinks: 2000,
        }
    }
}

/// A history that breaks a law.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counterexample {
    /// Overflow or not, step by step, up to the step where it shows.
    pub found_inf: Vec<bool>,
    /// Before which step the state was saved and loaded, or a second replica parted, where the law does that.
    pub at: Option<usize>,
    /// What the law asks for.
    pub expected: String,
    /// What the subject did.
    pub seen: String,
}

/// How one law came out.
#[derive(Debug, Clone, PartialEq)]
pub struct Property {
    /// The law.
    pub name: &'static str,
    /// Whether it was kept, or broken as declared.
    pub passed: bool,
    /// Histories tried.
    pub cases: u32,
    /// The smallest history found that breaks it.
    pub counterexample: Option<Counterexample>,
    /// The reason of a declared exception.
    pub exception: Option<String>,
}

/// How all laws came out.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// One a law, in the order of [`LAWS`].
    pub properties: Vec<Property>,
    /// What was learnt or given before the search.
    pub facts: Facts,
    /// What may make the answer weaker than it looks.
    pub warnings: Vec<String>,
}

impl Report {
    /// Whether every law was kept or broken as declared.
    pub fn passed(&self) -> bool {
        self.properties.iter().all(|p| p.passed)
    }

    /// The laws that were broken without being declared, or declared without being broken.
    pub fn failed(&self) -> impl Iterator<Item = &Property> {
        self.properties.iter().filter(|p| !p.passed)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for p in &self.properties {
            let word = match (p.passed, &p.exception) {
                (true, None) => "ok",
                (true, Some(_)) => "excused",
                (false, _) => "BROKEN",
            };
            writeln!(f, "{word:>8}  {:<28} {:>6} cases", p.name, p.cases)?;
            if let Some(reason) = &p.exception {
                writeln!(f, "          declared: {reason}")?;
            }
            if let Some(c) = p.counterexample.as_ref().filter(|_| !p.passed) {
                let at = c.at.map_or(String::new(), |at| {
                    format!(" (saved and loaded, or parted, before step {at})")
                });
                writeln!(f, "          after {}{at}", history::compact(&c.found_inf))?;
                writeln!(f, "          expected {}", c.expected)?;
                writeln!(f, "          seen     {}", c.seen)?;
            }
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        Ok(())
    }
}

/// Holds a scaler that implements [`Policy`] to the laws. `build` makes a new one in its first state.
pub fn check_policy<P: Into<Box<dyn Policy>>>(build: impl Fn() -> P, options: &Options) -> Report {
    let build = || build().into();
    let mut make =
        || -> Result<Box<dyn Subject + '_>, Failure> { Ok(Box::new(PolicySubject::new(&build))) };
    match check(&mut make, options) {
        Ok(report) => report,
        // A policy in this process always answers its first reset.
        Err(failure) => unreachable!("{failure}"),
    }
}

/// Holds any [`Subject`] to the laws. `make` gives a new one, or another running copy of the same.
///
/// # Errors
/// When the subject fails before its first answer. Later failures are a broken property, [`ANSWERS`].
pub fn check<'a>(
    make: &mut dyn FnMut() -> Result<Box<dyn Subject + 'a>, Failure>,
    options: &Options,
) -> Result<Report, Failure> {
    search::check(make, options)
}

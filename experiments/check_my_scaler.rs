//! Question: does a loss scaler of your own keep the laws?
//!
//! Implement `Policy` for it and call one function, here or in a `#[test]`. This one is PyTorch's rule with a floor, and
//! with a bug that is easy to write and hard to see: an overflow does not reset the count of clean steps.
//!
//! ```text
//! cargo run --example check_my_scaler
//! ```
//!
//! In a test, two lines:
//!
//! ```ignore
//! let report = check_policy(MyScaler::new, &Options::default());
//! assert!(report.passed(), "{report}");
//! ```

use std::process::ExitCode;

use gradscale::scaling::laws::{Interval, Options, check_policy};
use gradscale::scaling::policy::{Change, Observed, Policy, PolicyError, State, Terminal, Update};

#[derive(Debug, Clone)]
struct MyScaler {
    scale: f32,
    clean_steps: u64,
}

impl MyScaler {
    const INTERVAL: u64 = 50;

    fn new() -> Self {
        MyScaler {
            scale: 65536.0,
            clean_steps: 0,
        }
    }
}

impl Policy for MyScaler {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        if observed.found_inf {
            self.scale = (self.scale * 0.5).max(1.0);
            // The bug: `self.clean_steps = 0` is missing.
            return Ok(Update {
                skipped: true,
                change: Change::BackedOff,
            });
        }
        self.clean_steps += 1;
        if self.clean_steps == Self::INTERVAL {
            self.clean_steps = 0;
            self.scale = (self.scale * 2.0).min(2f32.powi(24));
            return Ok(Update {
                skipped: false,
                change: Change::Grown,
            });
        }
        Ok(Update {
            skipped: false,
            change: Change::Kept,
        })
    }

    fn save(&self) -> State {
        let fields = [
            ("scale", self.scale.into()),
            ("clean_steps", self.clean_steps.into()),
        ];
        fields
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }

    fn load(&mut self, state: &State) -> Result<(), PolicyError> {
        self.scale = state["scale"].as_f64().unwrap_or(f64::NAN) as f32;
        self.clean_steps = state["clean_steps"].as_u64().unwrap_or(0);
        Ok(())
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}

fn main() -> ExitCode {
    let options = Options {
        interval: Interval::Exactly(MyScaler::INTERVAL),
        ..Options::default()
    };
    let report = check_policy(MyScaler::new, &options);
    print!("{report}");
    let broken: Vec<&str> = report.failed().map(|p| p.name).collect();
    println!("\nbroken: {}", broken.join(", "));
    // The bug is there on purpose: finding it is success.
    if broken == ["never_grows_early"] {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

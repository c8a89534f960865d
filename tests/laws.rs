//! The laws find what is wrong with wrong scalers, and nothing in the right ones.

use std::sync::atomic::{AtomicU64, Ordering};

use gradscale::scaling::laws::{Excuse, Interval, LAWS, Options, Report, WhenKept, check_policy};
use gradscale::scaling::policy::{
    Change, Defaults, Observed, Policy, PolicyError, PolicySpec, State, Terminal, Update, policies,
};

/// The growth interval of every scaler in this file.
const INTERVAL: u64 = 8;

/// What is wrong with a scaler.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    GrowsOneStepEarlyAfterOverflow,
    GrowsOneStepLate,
    GrowsLateOnlyAfterOverflow,
    KeepsItsCounterOnOverflow,
    CounterRunsPastAfterLoad,
    NeverGrows,
    NeverBacksOff,
    HalvesTwiceInABurst,
    DoublesOnOverflow,
    ShrinksOnClean,
    DoesNotSkip,
    SkipsTheStepAfterOverflow,
    ForgetsItsCounterOnLoad,
    ForgetsItsScaleOnLoad,
    SaturatesToInfinity,
    NoFloor,
    SticksAtTheFloor,
    SticksAtTheCeiling,
    DependsOnTheClock,
    DependsOnOtherObjects,
    IgnoresEveryHundredthOverflow,
    RefusesItsOwnState,
    RefillsHysteresisWhenClean,
}

/// A scaler with a floor of 2^-20 and a ceiling of 2^40, right but for its fault.
#[derive(Debug, Clone)]
struct Scaler {
    fault: Fault,
    scale: f32,
    counter: u64,
    overflows: u64,
    in_burst: bool,
    after_overflow: bool,
    patience: u64,
    stuck: bool,
    number: u64,
}

static OBJECTS: AtomicU64 = AtomicU64::new(0);

impl Scaler {
    fn new(fault: Fault) -> Self {
        let number = OBJECTS.fetch_add(1, Ordering::Relaxed);
        Scaler {
            fault,
            scale: 65536.0,
            counter: 0,
            overflows: 0,
            in_burst: false,
            after_overflow: false,
            patience: 2,
            stuck: false,
            number,
        }
    }

    fn interval(&self) -> u64 {
        match self.fault {
            Fault::GrowsOneStepEarlyAfterOverflow if self.after_overflow => INTERVAL - 1,
            Fault::GrowsOneStepLate => INTERVAL + 1,
            Fault::GrowsLateOnlyAfterOverflow if self.after_overflow => INTERVAL + 3,
            Fault::NeverGrows => u64::MAX,
            Fault::DependsOnOtherObjects if self.number.is_multiple_of(2) => INTERVAL + 1,
            _ => INTERVAL,
        }
    }

    fn overflow(&mut self) {
        self.overflows += 1;
        if self.fault == Fault::IgnoresEveryHundredthOverflow && self.overflows.is_multiple_of(100)
        {
            return;
        }
        let factor = match self.fault {
            Fault::NeverBacksOff => 1.0,
            Fault::HalvesTwiceInABurst if self.in_burst => 0.25,
            Fault::DoublesOnOverflow => 2.0,
            Fault::RefillsHysteresisWhenClean if self.patience > 1 => 1.0,
            _ => 0.5,
        };
        self.patience -= u64::from(self.patience > 1);
        let floor = if self.fault == Fault::NoFloor {
            0.0
        } else {
            2f32.powi(-20)
        };
        let ceiling = 2f32.powi(40);
        if self.fault == Fault::SticksAtTheCeiling && self.scale == ceiling {
            self.stuck = true;
        }
        if !self.stuck {
            self.scale = (self.scale * factor).max(floor);
        }
        if self.fault == Fault::SticksAtTheFloor && self.scale == floor {
            self.stuck = true;
        }
        if self.fault != Fault::KeepsItsCounterOnOverflow {
            self.counter = 0;
        }
        (self.in_burst, self.after_overflow) = (true, true);
    }

    fn clean(&mut self) {
        self.in_burst = false;
        self.patience = 2;
        self.counter += 1;
        if self.fault == Fault::DependsOnTheClock {
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .expect("after 1970");
            self.counter += u64::from(now.subsec_nanos().is_multiple_of(97));
        }
        if self.fault == Fault::ShrinksOnClean && self.counter == 3 {
            self.scale *= 0.75;
        }
        let due = match self.fault {
            // Equality never holds again once the counter is past.
            Fault::CounterRunsPastAfterLoad => self.counter == self.interval(),
            _ => self.counter >= self.interval(),
        };
        if due {
            self.counter = 0;
            self.after_overflow = false;
            if !self.stuck {
                let grown = self.scale * 2.0;
                self.scale = if self.fault == Fault::SaturatesToInfinity {
                    grown
                } else {
                    grown.min(2f32.powi(40))
                };
            }
        }
    }
}

impl Policy for Scaler {
    fn loss_scale(&self) -> f64 {
        self.scale.into()
    }

    fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
        let mut skipped = observed.found_inf;
        if self.fault == Fault::SkipsTheStepAfterOverflow {
            skipped |= self.in_burst;
        }
        if self.fault == Fault::IgnoresEveryHundredthOverflow && observed.found_inf {
            skipped = !(self.overflows + 1).is_multiple_of(100);
        }
        if observed.found_inf {
            self.overflow()
        } else {
            self.clean()
        }
        skipped &= self.fault != Fault::DoesNotSkip;
        Ok(Update {
            skipped,
            change: Change::Kept,
        })
    }

    fn save(&self) -> State {
        let fields = [
            ("scale", f64::from(self.scale).into()),
            ("counter", self.counter.into()),
            ("overflows", self.overflows.into()),
            ("in_burst", self.in_burst.into()),
            ("after_overflow", self.after_overflow.into()),
            ("patience", self.patience.into()),
            ("stuck", self.stuck.into()),
        ];
        fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
    }

    fn load(&mut self, state: &State) -> Result<(), PolicyError> {
        if self.fault == Fault::RefusesItsOwnState {
            return Err(PolicyError::BadState {
                policy: "scaler",
                field: "scale".to_owned(),
                found: "a float".to_owned(),
                expected: "a tensor",
            });
        }
        let number = |name: &str| state[name].as_f64().unwrap_or(0.0);
        if self.fault != Fault::ForgetsItsScaleOnLoad {
            self.scale = number("scale") as f32;
        }
        if self.fault != Fault::ForgetsItsCounterOnLoad {
            self.counter = number("counter") as u64;
        }
        if self.fault == Fault::CounterRunsPastAfterLoad {
            self.counter += 1;
        }
        self.overflows = number("overflows") as u64;
        self.patience = number("patience") as u64;
        self.in_burst = state["in_burst"] == true;
        self.after_overflow = state["after_overflow"] == true;
        self.stuck = state["stuck"] == true;
        Ok(())
    }

    fn clone_box(&self) -> Box<dyn Policy> {
        Box::new(self.clone())
    }
}

/// Every wrong scaler, with the law that must be among those that find it.
const WRONG: &[(Fault, &str)] = &[
    (Fault::GrowsOneStepEarlyAfterOverflow, "never_grows_early"),
    (Fault::GrowsOneStepLate, "grows_when_clean"),
    (Fault::GrowsLateOnlyAfterOverflow, "grows_when_clean"),
    (Fault::KeepsItsCounterOnOverflow, "never_grows_early"),
    (Fault::CounterRunsPastAfterLoad, "save_load_continues"),
    (Fault::NeverGrows, "grows_when_clean"),
    (Fault::NeverBacksOff, "backs_off_on_overflow"),
    (Fault::HalvesTwiceInABurst, "same_as_policy"),
    (Fault::DoublesOnOverflow, "moves_the_right_way"),
    (Fault::ShrinksOnClean, "moves_the_right_way"),
    (Fault::DoesNotSkip, "skips_exactly_on_overflow"),
    (
        Fault::SkipsTheStepAfterOverflow,
        "skips_exactly_on_overflow",
    ),
    (Fault::ForgetsItsCounterOnLoad, "save_load_continues"),
    (Fault::ForgetsItsScaleOnLoad, "save_load_continues"),
    (Fault::SaturatesToInfinity, "growth_is_guarded"),
    (Fault::NoFloor, "scale_stays_positive"),
    (Fault::SticksAtTheFloor, "no_livelock_at_floor"),
    (Fault::SticksAtTheCeiling, "no_livelock_at_ceiling"),
    (Fault::DependsOnTheClock, "deterministic"),
    (Fault::DependsOnOtherObjects, "replicas_agree"),
    (
        Fault::IgnoresEveryHundredthOverflow,
        "skips_exactly_on_overflow",
    ),
    (Fault::RefusesItsOwnState, "save_load_continues"),
    (Fault::RefillsHysteresisWhenClean, "backs_off_on_overflow"),
];

fn options() -> Options {
    Options {
        cases: 1000,
        interval: Interval::Exactly(INTERVAL),
        hysteresis: Some(1),
        ..Options::default()
    }
}

fn broken(report: &Report) -> Vec<&'static str> {
    report.failed().map(|p| p.name).collect()
}

#[test]
fn every_wrong_scaler_is_found_within_a_thousand_cases() {
    println!("{:>36}  broken laws (histories tried)", "");
    for &(fault, law) in WRONG {
        let mut report = check_policy(|| Scaler::new(fault), &options());
        if law == "same_as_policy" {
            // Its floor and ceiling are this one's.
            let reference = PolicySpec::parse(
                "colossalai:growth_interval=8,hysteresis=1,min_scale=2^-20,max_scale=2^40",
            );
            let options = Options {
                reference: Some(reference.expect("valid")),
                ..options()
            };
            report = check_policy(|| Scaler::new(fault), &options);
        }
        let found: Vec<String> = report
            .failed()
            .map(|p| format!("{} ({})", p.name, p.cases))
            .collect();
        println!("{:>36}  {}", format!("{fault:?}"), found.join(", "));
        assert!(
            broken(&report).contains(&law),
            "{fault:?} must break {law}:\n{report}"
        );
        assert!(
            report
                .failed()
                .all(|p| p.cases <= 1000 && p.counterexample.is_some()),
            "{fault:?}:\n{report}"
        );
    }
    // Each law earns its place by a scaler that it finds.
    for law in LAWS
        .iter()
        .filter(|l| !["recovers_after_burst", "replicas_out_of_step_show"].contains(&l.name))
    {
        assert!(
            WRONG.iter().any(|(_, name)| *name == law.name),
            "no wrong scaler is there for {}",
            law.name
        );
    }
}

#[test]
fn a_right_scaler_is_not_accused() {
    let report = check_policy(|| Scaler::new(Fault::None), &options());
    assert!(report.passed(), "{report}");
}

#[test]
fn bursts_and_desync_are_found_by_their_own_laws() {
    let found = |fault| broken(&check_policy(|| Scaler::new(fault), &options()));
    assert!(found(Fault::SticksAtTheFloor).contains(&"no_livelock_at_floor"));
    assert!(found(Fault::NeverGrows).contains(&"recovers_after_burst"));
    // A scaler that takes no notice of overflows, its counter included, hides a missing all-reduce.
    #[derive(Debug, Clone)]
    struct Deaf(Scaler);
    impl Policy for Deaf {
        fn loss_scale(&self) -> f64 {
            self.0.loss_scale()
        }
        fn update(&mut self, observed: Observed) -> Result<Update, Terminal> {
            self.0.update(Observed {
                found_inf: false,
                ..observed
            })?;
            Ok(Update {
                skipped: observed.found_inf,
                change: Change::Kept,
            })
        }
        fn save(&self) -> State {
            self.0.save()
        }
        fn load(&mut self, state: &State) -> Result<(), PolicyError> {
            self.0.load(state)
        }
        fn clone_box(&self) -> Box<dyn Policy> {
            Box::new(self.clone())
        }
    }
    let report = check_policy(|| Deaf(Scaler::new(Fault::None)), &options());
    assert!(
        broken(&report).contains(&"replicas_out_of_step_show"),
        "{report}"
    );
}

#[test]
fn a_counter_that_overflow_does_not_reset_shrinks_to_an_interval() {
    for seed in 0..5 {
        let report = check_policy(
            || Scaler::new(Fault::KeepsItsCounterOnOverflow),
            &Options { seed, ..options() },
        );
        let property = report
            .failed()
            .find(|p| p.name == "never_grows_early")
            .expect("found");
        let steps = property
            .counterexample
            .as_ref()
            .expect("a history")
            .found_inf
            .len() as u64;
        assert!(
            steps <= INTERVAL + 2,
            "seed {seed}: {steps} steps\n{report}"
        );
    }
}

#[test]
fn real_policies_keep_every_law_that_they_do_not_declare_and_break_every_one_that_they_do() {
    for info in policies() {
        let mut spec = PolicySpec::named(info.name).expect("registered");
        if spec.has("growth_interval") {
            spec = spec
                .with("growth_interval", INTERVAL)
                .expect("any interval");
        }
        let excuse = |e: &gradscale::scaling::policy::Exception| {
            assert!(
                LAWS.iter().any(|l| l.name == e.law),
                "{} declares {}",
                info.name,
                e.law
            );
            Excuse {
                law: e.law.to_owned(),
                reason: e.reason.to_owned(),
                when_kept: WhenKept::Fail,
            }
        };
        let options = Options {
            excuses: info.exceptions.iter().map(excuse).collect(),
            ..Options::default()
        };
        let report = check_policy(|| spec.build(Defaults::Class).expect("builds"), &options);
        assert!(report.passed(), "{spec}:\n{report}");
    }
}

#[test]
fn a_declared_exception_that_is_none_fails() {
    let excuse = Excuse {
        law: "deterministic".to_owned(),
        reason: "it rolls dice".to_owned(),
        when_kept: WhenKept::Fail,
    };
    let report = check_policy(
        || Scaler::new(Fault::None),
        &Options {
            cases: 50,
            excuses: vec![excuse],
            ..options()
        },
    );
    assert_eq!(broken(&report), ["deterministic"]);
    assert!(report.to_string().contains("take the declaration back"));
}

#[test]
fn the_same_seed_finds_the_same_history() {
    let run = || {
        check_policy(
            || Scaler::new(Fault::IgnoresEveryHundredthOverflow),
            &Options {
                seed: 7,
                ..options()
            },
        )
    };
    assert_eq!(run(), run());
}

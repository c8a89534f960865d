//! The search: histories drawn by proptest, and what breaks a law made small.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::history::{classics, strategy};
use super::rules::{Bench, LAWS, Law};
use super::{
    ANSWERS, Case, Counterexample, Failure, Interval, Options, Property, Report, SAME_AS_POLICY,
    Subject, WhenKept, facts,
};

/// Runs every law. See [`super::check`].
pub(super) fn check<'a>(
    make: &mut dyn FnMut() -> Result<Box<dyn Subject + 'a>, Failure>,
    options: &Options,
) -> Result<Report, Failure> {
    let mut report = Report {
        properties: Vec::new(),
        facts: facts::Facts::unknown(),
        warnings: Vec::new(),
    };
    let mut subject = make()?;
    if let Err(failure) = subject.reset() {
        if failure.had_answered {
            report.properties.push(failed(failure, 0));
            return Ok(report);
        }
        return Err(failure);
    }
    let learnt = match &options.reference {
        // Beside a reference, its facts are the truth and the subject's are what is judged.
        Some(spec) => {
            let build = || {
                spec.build(super::super::policy::Defaults::Class)
                    .expect("a parsed spec builds")
            };
            facts::learn(&mut super::PolicySubject::new(&build), options)
        }
        None => facts::learn(subject.as_mut(), options),
    };
    match learnt {
        Ok(facts) => report.facts = facts,
        Err(failure) => {
            report.properties.push(failed(failure, 0));
            return Ok(report);
        }
    }
    if report.facts.latest_growth.is_none() {
        report.warnings.push(format!(
            "no growth was seen in {} clean steps; the laws of growth hold for want of a case",
            options.reach
        ));
    }
    if let Interval::Exactly(n) | Interval::OrOneMore(n) = options.interval
        && n > options.reach as u64
    {
        report.warnings.push(format!(
            "the growth interval {n} is beyond the {} steps that are tried",
            options.reach
        ));
    }
    let mut bench = Bench {
        subject,
        second: None,
        make,
        facts: report.facts.clone(),
        reference: options.reference.clone(),
        drive: options.drive,
    };
    for law in LAWS
        .iter()
        .filter(|l| l.name != SAME_AS_POLICY || options.reference.is_some())
    {
        match judge(&mut bench, law, options) {
            Ok(property) => report.properties.push(property),
            Err((failure, cases)) => {
                // A program that is gone answers nothing more.
                report.properties.push(failed(failure, cases));
                break;
            }
        }
    }
    Ok(report)
}

fn failed(failure: Failure, cases: u32) -> Property {
    let counterexample = Counterexample {
        found_inf: failure.found_inf,
        at: None,
        expected: failure.expected,
        seen: format!("{}: {}", failure.doing, failure.found),
    };
    Property {
        name: ANSWERS,
        passed: false,
        cases,
        counterexample: Some(counterexample),
        exception: None,
    }
}

fn judge(
    bench: &mut Bench<'_, '_>,
    law: &'static Law,
    options: &Options,
) -> Result<Property, (Failure, u32)> {
    let excuse = options.excuses.iter().find(|e| e.law == law.name);
    let exception = excuse.map(|e| e.reason.clone());
    if excuse.is_some_and(|e| e.when_kept == WhenKept::NotTried) {
        return Ok(Property {
            name: law.name,
            passed: true,
            cases: 0,
            counterexample: None,
            exception,
        });
    }
    let (cases, found) = search(bench, law, options)?;
    let (passed, counterexample) = match (excuse, found) {
        (None, found) => (found.is_none(), found),
        (Some(_), Some(found)) => (true, Some(found)),
        (Some(excuse), None) if excuse.when_kept == WhenKept::Note => (true, None),
        (Some(_), None) => (false, None),
    };
    let exception = exception.map(|reason| match (passed, &counterexample) {
        (false, None) => {
            format!("{reason} -- but no history broke the law: take the declaration back")
        }
        (true, None) => format!("{reason} -- not broken in this configuration"),
        _ => reason,
    });
    Ok(Property {
        name: law.name,
        passed,
        cases,
        counterexample,
        exception,
    })
}

/// The classics, then what proptest draws; the first that breaks the law, made small.
fn search(
    bench: &mut Bench<'_, '_>,
    law: &Law,
    options: &Options,
) -> Result<(u32, Option<Counterexample>), (Failure, u32)> {
    let mut cases = 0;
    let replayed = options.replay.as_ref().map(std::slice::from_ref);
    let mut first = replayed.map_or_else(|| classics(&bench.facts), <[Case]>::to_vec);
    if replayed.is_none() && law.name == "growth_is_guarded" {
        // The drive to the ceiling, marked by a save point at the end.
        first.insert(
            0,
            Case {
                found_inf: Vec::new(),
                at: 0,
            },
        );
    }
    let limit = options.cases.min(law.most_cases);
    for case in first.into_iter().take(if replayed.is_some() {
        1
    } else {
        limit as usize
    }) {
        cases += 1;
        if let Some(found) = (law.rule)(bench, &case).map_err(|f| (f, cases))? {
            let small = if replayed.is_some() {
                found
            } else {
                minimise(bench, law, case, found, options.shrinks).map_err(|f| (f, cases))?
            };
            return Ok((cases, Some(small)));
        }
    }
    if replayed.is_some() {
        return Ok((cases, None));
    }

    let strategy = strategy(&bench.facts);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng(options.seed, law.name));
    while cases < limit {
        cases += 1;
        // The strategy has no filter that could reject.
        let Ok(mut tree) = strategy.new_tree(&mut runner) else {
            continue;
        };
        let Some(mut found) = (law.rule)(bench, &tree.current()).map_err(|f| (f, cases))? else {
            continue;
        };
        let mut case = tree.current();
        let mut tries = 0;
        while tries < options.shrinks / 2 && tree.simplify() {
            loop {
                tries += 1;
                match (law.rule)(bench, &tree.current()).map_err(|f| (f, cases))? {
                    Some(smaller) => {
                        (found, case) = (smaller, tree.current());
                        break;
                    }
                    None if tries < options.shrinks / 2 && tree.complicate() => {}
                    None => {
                        tries = usize::MAX;
                        break;
                    }
                }
            }
        }
        let small =
            minimise(bench, law, case, found, options.shrinks / 2).map_err(|f| (f, cases))?;
        return Ok((cases, Some(small)));
    }
    Ok((cases, None))
}

/// Removes what is not needed: chunks of steps from half the history down to single ones, then overflows.
///
/// Proptest shrinks runs; this works step by step, so that no step of the result can be left out.
fn minimise(
    bench: &mut Bench<'_, '_>,
    law: &Law,
    case: Case,
    found: Counterexample,
    tries: usize,
) -> Result<Counterexample, Failure> {
    let (mut case, mut best, mut left) = (case, found, tries);
    // What comes after the step that broke the law is not needed; laws that append their own steps keep them.
    if best.found_inf.len() < case.found_inf.len() {
        let cut = Case {
            at: case.at.min(best.found_inf.len()),
            found_inf: best.found_inf.clone(),
        };
        if let Some(found) = (law.rule)(bench, &cut)? {
            (case, best) = (cut, found);
        }
    }
    let mut chunk = (case.found_inf.len() / 2).max(1);
    loop {
        let mut start = 0;
        let mut removed = false;
        while start < case.found_inf.len() && left > 0 {
            let end = (start + chunk).min(case.found_inf.len());
            let mut smaller = case.found_inf.clone();
            smaller.drain(start..end);
            let at = if case.at >= end {
                case.at - (end - start)
            } else {
                case.at.min(start)
            };
            let smaller = Case {
                at: at.min(smaller.len()),
                found_inf: smaller,
            };
            left -= 1;
            match (law.rule)(bench, &smaller)? {
                Some(found) if found.found_inf.len() <= best.found_inf.len() => {
                    (case, best, removed) = (smaller, found, true);
                }
                _ => start = end,
            }
        }
        if left == 0 || (chunk == 1 && !removed) {
            break;
        }
        chunk = (chunk / 2).max(1);
    }
    for i in 0..case.found_inf.len() {
        if case.found_inf[i] && left > 0 {
            let mut calmer = case.clone();
            calmer.found_inf[i] = false;
            left -= 1;
            if let Some(found) =
                (law.rule)(bench, &calmer)?.filter(|f| f.found_inf.len() <= best.found_inf.len())
            {
                (case, best) = (calmer, found);
            }
        }
    }
    Ok(best)
}

/// A generator for each law, so that one law's search does not depend on another's.
fn rng(seed: u64, law: &str) -> TestRng {
    let mut bytes = [0_u8; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    for (i, b) in law.bytes().enumerate() {
        bytes[8 + i % 24] = bytes[8 + i % 24].rotate_left(3) ^ b;
    }
    TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
}

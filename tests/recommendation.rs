//! The rule, on synthetic runs whose truth is known. `experiments/rule.rs` has the whole table.

mod common;

use common::synthetic::{Shape, run};
use gradscale::scaling::{Options, Recommendation, recommend};

fn answers(shape: Shape, steps: usize, underflow: f64) -> Vec<Recommendation> {
    let options = Options::new().unwrap();
    (1..=3)
        .map(|seed| recommend(&run(shape, steps, underflow, seed), &options).unwrap())
        .collect()
}

fn intervals(answers: &[Recommendation]) -> Vec<u64> {
    answers
        .iter()
        .map(|answer| answer.growth_interval.unwrap())
        .collect()
}

#[test]
fn the_default_stays_where_it_loses_nothing() {
    for shape in [Shape::Steady, Shape::Drifting] {
        for steps in [1_500, 10_000] {
            for underflow in [0.0, 1e-6] {
                let answers = answers(shape, steps, underflow);
                assert_eq!(
                    intervals(&answers),
                    [2000; 3],
                    "{shape:?} {steps} {underflow}"
                );
                assert!(
                    answers
                        .iter()
                        .all(|a| a.verdict.as_str() == "keep_default" && a.default_is_fine)
                );
            }
        }
    }
}

#[test]
fn a_spiky_run_with_much_underflow_wants_a_short_interval() {
    for (underflow, from, to) in [(1e-4, 150, 800), (1e-3, 90, 400), (1e-2, 40, 200)] {
        let answers = answers(Shape::Spiky, 10_000, underflow);
        let intervals = intervals(&answers);
        assert!(
            intervals.iter().all(|n| (from..to).contains(n)),
            "{underflow}: {intervals:?}"
        );
        for answer in &answers {
            let j = |c: &gradscale::scaling::Candidate| c.cost.j(answer.measure);
            assert!(
                j(answer.recommended.as_ref().unwrap()) < 0.5 * j(&answer.default),
                "it pays"
            );
        }
    }
}

#[test]
fn neighbouring_seeds_do_not_flip_the_answer() {
    for (shape, underflow) in [
        (Shape::Steady, 1e-3),
        (Shape::Drifting, 1e-3),
        (Shape::Drifting, 1e-2),
    ] {
        let answers = answers(shape, 5_000, underflow);
        let intervals = intervals(&answers);
        let (low, high) = (
            intervals.iter().min().unwrap(),
            intervals.iter().max().unwrap(),
        );
        assert!(
            *high as f64 / *low as f64 <= 1.5,
            "{shape:?} {underflow}: {intervals:?}"
        );
        assert!(answers.iter().all(|a| a.verdict == answers[0].verdict));
    }
}

#[test]
fn it_never_runs_to_the_length_of_the_run() {
    for shape in [Shape::Steady, Shape::Spiky, Shape::Drifting] {
        for underflow in [0.0, 1e-4, 1e-2] {
            for answer in answers(shape, 4_000, underflow) {
                assert!(
                    answer.growth_interval.unwrap() <= 2000,
                    "{shape:?} {underflow}"
                );
            }
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_answer_and_the_interval_holds_the_point() {
    let run = run(Shape::Spiky, 5_000, 1e-3, 1);
    let (a, b) = (
        recommend(&run, &Options::new().unwrap()).unwrap(),
        recommend(&run, &Options::new().unwrap()).unwrap(),
    );
    assert_eq!(a, b);
    let recommended = a.recommended.unwrap();
    let (low, high) = recommended.confidence.unwrap();
    let j = recommended.cost.j(a.measure);
    assert!(low <= j && j <= high, "{low} {j} {high}");
    assert!(a.bootstrap.unwrap().block_length >= 1.0);
    assert!(a.backtest.is_some() && a.stress.is_some());
}

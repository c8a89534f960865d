//! The sketch against brute force: every element converted on its own.

use gradscale::float::{Cuts, FORMATS, Format, Outcome};
use gradscale::tally::{Accumulator, Outcomes, SUB_BIN_EDGES, Sketch};
use proptest::prelude::*;

fn brute_force(values: &[f32], format: Format, scale: f32, flush: bool) -> Outcomes {
    let mut counts = Outcomes::default();
    for &value in values {
        match format.outcome(value, scale) {
            Outcome::ZeroIn => counts.zero_in += 1,
            Outcome::NonfiniteIn => counts.nonfinite_in += 1,
            Outcome::UnderflowToZero => counts.underflow_to_zero += 1,
            Outcome::Subnormal if flush => counts.underflow_to_zero += 1,
            Outcome::Subnormal => counts.subnormal += 1,
            Outcome::Normal => counts.normal += 1,
            Outcome::OverflowToInfinity => counts.overflow_to_infinity += 1,
        }
    }
    counts
}

/// Values where the trouble is: zeros, infinities, NaN, every sub-bin edge of every binade, thresholds, plain numbers.
fn value() -> impl Strategy<Value = f32> {
    let edge = (
        0u32..255,
        0usize..SUB_BIN_EDGES.len(),
        -1i32..=1,
        any::<bool>(),
    )
        .prop_map(|(e, edge, off, negative)| {
            let magnitude =
                ((e << 23) as i64 + i64::from(SUB_BIN_EDGES[edge]) + i64::from(off)).max(0) as u32;
            f32::from_bits(magnitude | u32::from(negative) << 31)
        });
    prop_oneof![
        8 => edge,
        2 => any::<u32>().prop_map(f32::from_bits),
        2 => (-40f32..10.0).prop_map(|x| x.exp2()),
        1 => (0u32..24).prop_map(|bit| f32::from_bits(1 << bit)),
        1 => prop_oneof![Just(0.0), Just(-0.0), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(f32::NAN)],
    ]
}

fn values() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(value(), 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(prop::test_runner::FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::with_cases(256)
    })]

    #[test]
    fn counts_equal_brute_force_at_every_power_of_two(values in values(), exponent in -60i32..=60, flush: bool) {
        let sketch = Sketch::of(&values);
        let scale = 2f32.powi(exponent);
        for format in FORMATS {
            let replayed = sketch.replay(format, scale, flush);
            let truth = brute_force(&values, format, scale, flush);
            prop_assert_eq!(replayed.outcomes.elements(), values.len() as u64);
            if replayed.why_not_exact.is_none() {
                prop_assert_eq!(replayed.outcomes, truth, "{} at 2^{}", format.name, exponent);
            } else {
                prop_assert!(format.name == "bf16" && scale < 1.0, "{} at 2^{} is not exact", format.name, exponent);
            }
        }
    }

    #[test]
    fn bounds_hold_the_truth_at_any_scale(values in values(), scale in prop_oneof![
        1e-12f32..1e12, Just(3.0f32), Just(24576.25f32), (-30i32..40).prop_map(|k| 2f32.powi(k)).boxed()]) {
        let sketch = Sketch::of(&values);
        for format in FORMATS {
            let replayed = sketch.replay(format, scale, false);
            let truth = brute_force(&values, format, scale, false);
            let (low, high) = replayed.bounds;
            for (low, truth, point, high) in [
                (low.underflow_to_zero, truth.underflow_to_zero, replayed.outcomes.underflow_to_zero, high.underflow_to_zero),
                (low.subnormal, truth.subnormal, replayed.outcomes.subnormal, high.subnormal),
                (low.normal, truth.normal, replayed.outcomes.normal, high.normal),
                (low.overflow_to_infinity, truth.overflow_to_infinity, replayed.outcomes.overflow_to_infinity, high.overflow_to_infinity),
            ] {
                prop_assert!(low <= truth && truth <= high, "{low} <= {truth} <= {high}");
                prop_assert!(low <= point && point <= high, "{low} <= {point} <= {high}");
            }
            prop_assert_eq!(replayed.outcomes.elements(), values.len() as u64);
        }
    }

    #[test]
    fn any_split_merged_in_any_order_equals_the_whole(values in values(), cuts in prop::collection::vec(0usize..200, 0..6), backwards: bool) {
        let whole = Sketch::of(&values);
        let mut ends: Vec<usize> = cuts.into_iter().map(|c| c.min(values.len())).collect();
        ends.extend([0, values.len()]);
        ends.sort_unstable();
        let mut parts: Vec<Sketch> = ends.windows(2).map(|w| Sketch::of(&values[w[0]..w[1]])).collect();
        if backwards {
            parts.reverse();
        }
        let mut merged = Sketch::default();
        for part in &parts {
            merged.merge(part);
        }
        prop_assert_eq!(&merged, &whole);
        let mut shuffled = values.clone();
        shuffled.reverse();
        prop_assert_eq!(Sketch::of(&shuffled), whole);
    }

    #[test]
    fn norms_lost_equal_those_of_the_elements(values in values(), exponent in -20i32..=30) {
        let sketch = Sketch::of(&values);
        let scale = 2f32.powi(exponent);
        let format = FORMATS[0];
        let cuts = Cuts::new(format, scale);
        let (mut l1, mut l2, mut lost_l1, mut lost_l2) = (0.0, 0.0, 0.0, 0.0);
        for &x in values.iter().filter(|x| x.is_finite()) {
            let x_64 = f64::from(x.abs());
            l1 += x_64;
            l2 += x_64 * x_64;
            if cuts.outcome(x) == Outcome::UnderflowToZero {
                lost_l1 += x_64;
                lost_l2 += x_64 * x_64;
            }
        }
        let close = |a: f64, b: f64, tolerance: f64| a == b || (a - b).abs() <= tolerance * a.abs().max(b.abs());
        let lost = sketch.replay(format, scale, false).lost;
        let truth = if l1 > 0.0 { lost_l1 / l1 } else { 0.0 };
        prop_assert!(close(lost.l1, truth, 1e-12), "{} {}", lost.l1, truth);
        let truth = if l2 > 0.0 { (lost_l2 / l2).sqrt() } else { 0.0 };
        prop_assert!(close(lost.l2, truth, 1e-3), "{} {}", lost.l2, truth);
    }

    #[test]
    fn shifting_equals_sketching_the_products(values in values(), exponent in -30i32..=30) {
        let products: Vec<f32> = values.iter().map(|x| x * 2f32.powi(exponent)).collect();
        let exact = values.iter().zip(&products).all(|(x, y)| {
            !x.is_finite() || f64::from(*x) * 2f64.powi(exponent) == f64::from(*y)
        });
        match Sketch::of(&values).shifted(exponent) {
            Some(shifted) => prop_assert_eq!(shifted, Sketch::of(&products)),
            None => prop_assert!(!exact),
        }
    }

    #[test]
    fn sums_are_exact(values in values()) {
        let sketch = Sketch::of(&values);
        let mut total = std::collections::BTreeMap::<i32, u128>::new();
        for x in values.iter().filter(|x| x.is_finite() && **x != 0.0) {
            let (exponent, field) = gradscale::tally::split(x.to_bits() & 0x7FFF_FFFF);
            *total.entry(exponent).or_default() += u128::from(field | 1 << 23);
        }
        let mut ours = std::collections::BTreeMap::<i32, u128>::new();
        for bin in sketch.bins() {
            *ours.entry(bin.exponent()).or_default() += bin.significands();
        }
        prop_assert_eq!(ours, total);
    }
}

#[test]
fn strided_and_transposed_views_count_what_they_show() {
    let data: Vec<f32> = (0..24)
        .map(|i| (i as f32 - 7.5) * 2f32.powi(-(i % 9) - 10))
        .collect();
    let array = ndarray::Array2::from_shape_vec((4, 6), data).unwrap();
    let view = array.slice(ndarray::s![..;2, 1..;3]);
    let elements: Vec<f32> = view.iter().copied().collect();
    assert_eq!(Sketch::of_view(&view), Sketch::of(&elements));
    assert_eq!(
        Sketch::of_view(&array.t()),
        Sketch::of(array.as_slice().unwrap())
    );
    assert_eq!(
        Sketch::of_view(&array.slice(ndarray::s![..0, ..])),
        Sketch::default()
    );
}

#[test]
fn every_sub_bin_edge_of_every_binade_counts_right_in_every_format() {
    let mut values = Vec::new();
    for exponent in 0u32..255 {
        for edge in SUB_BIN_EDGES {
            for offset in -1i64..=1 {
                let bits = i64::from(exponent << 23) + i64::from(edge) + offset;
                if (0..0x7F80_0000).contains(&bits) {
                    values.push(f32::from_bits(bits as u32));
                }
            }
        }
    }
    let sketch = Sketch::of(&values);
    for format in FORMATS {
        for exponent in (-40..=40).step_by(5) {
            let scale = 2f32.powi(exponent);
            let replayed = sketch.replay(format, scale, false);
            if replayed.why_not_exact.is_none() {
                assert_eq!(
                    replayed.outcomes,
                    brute_force(&values, format, scale, false),
                    "{} 2^{exponent}",
                    format.name
                );
            } else {
                assert!(format.name == "bf16" && exponent < 0);
            }
        }
    }
}

#[test]
fn an_accumulator_is_empty_after_it_is_finished() {
    let mut accumulator = Accumulator::new();
    accumulator.add(&[1.0, 0.0, f32::NAN, -2.5, 1e-40]);
    let first = accumulator.finish();
    assert_eq!(accumulator.finish(), Sketch::default());
    accumulator.add(&[1.0, 0.0, f32::NAN, -2.5, 1e-40]);
    assert_eq!(accumulator.finish(), first);
}

#[test]
fn amax_tells_empty_from_zero_from_nonfinite() {
    assert_eq!(Sketch::of(&[]).amax(), None);
    assert_eq!(Sketch::of(&[f32::INFINITY, f32::NAN]).amax(), None);
    assert_eq!(Sketch::of(&[0.0, -0.0, f32::NAN]).amax(), Some(0.0));
    assert_eq!(Sketch::of(&[-3.0, 1.0]).amax(), Some(3.0));
    assert_eq!(Sketch::of(&[0.0]).smallest_nonzero(), None);
}

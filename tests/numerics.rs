//! The conversions and their thresholds, against `half` and against each other, exhaustively where that is possible.

use gradscale::float::{BF16, Cuts, FORMATS, FP16, Format, Outcome, Top};

/// A small deterministic generator (SplitMix64), so that a failure can be repeated.
fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn half_code(format: Format, value: f32) -> u16 {
    match format.name {
        "fp16" => half::f16::from_f32(value).to_bits(),
        "bf16" => half::bf16::from_f32(value).to_bits(),
        other => unreachable!("half has no {other}"),
    }
}

/// Equal codes, where NaN equals any NaN: payloads are not part of the contract.
fn assert_same_code(format: Format, value: f32) {
    let (ours, theirs) = (format.code(value), half_code(format, value));
    if value.is_nan() {
        assert!(
            format.value(ours).is_nan() && format.value(theirs).is_nan(),
            "{} {:#x}",
            format.name,
            value.to_bits()
        );
    } else {
        assert_eq!(
            ours,
            theirs,
            "{} {value:e} ({:#010x})",
            format.name,
            value.to_bits()
        );
    }
}

fn codes(format: Format) -> impl Iterator<Item = u16> {
    (0..1u32 << format.bits).map(|code| code as u16)
}

#[test]
fn every_code_survives_the_way_there_and_back() {
    for format in FORMATS {
        for code in codes(format) {
            let value = format.value(code);
            if value.is_nan() {
                assert!(format.value(format.code(value)).is_nan());
            } else {
                assert_eq!(format.code(value), code, "{} {code:#x}", format.name);
            }
        }
    }
}

#[test]
fn values_of_all_codes_equal_those_of_half() {
    for code in 0..=u16::MAX {
        let pairs = [
            (FP16.value(code), half::f16::from_bits(code).to_f32()),
            (BF16.value(code), half::bf16::from_bits(code).to_f32()),
        ];
        for (ours, theirs) in pairs {
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{code:#x}"
            );
        }
    }
}

/// The midpoint between each code and the next, with the f32 on each side, both signs; the one above the largest finite
/// value too.
fn midpoints(format: Format) -> Vec<f32> {
    let mut values = Vec::new();
    for code in codes(format) {
        let low = format.value(code);
        if low.is_nan() || low.is_sign_negative() || low.is_infinite() {
            continue;
        }
        let next = format.value(code + 1);
        let step = if next.is_finite() {
            f64::from(next) - f64::from(low)
        } else {
            f64::from(low) - f64::from(format.value(code - 1))
        };
        let middle = (f64::from(low) + step / 2.0) as f32;
        for value in [low, middle.next_down(), middle, middle.next_up()] {
            values.extend([value, -value]);
        }
    }
    values
}

#[test]
fn every_midpoint_and_its_neighbours_round_as_in_half() {
    for format in [FP16, BF16] {
        let values = midpoints(format);
        assert!(values.len() > 200_000);
        for value in values {
            assert_same_code(format, value);
        }
    }
}

#[test]
fn every_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_nearer() {
    for format in FORMATS {
        for code in codes(format) {
            let low = format.value(code);
            let next = format.value(code.wrapping_add(1));
            if !low.is_finite() || !next.is_finite() || low.is_sign_negative() {
                continue;
            }
            let middle = ((f64::from(low) + f64::from(next)) / 2.0) as f32;
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(format.code(middle), even, "{} {middle:e}", format.name);
            assert_eq!(format.code(middle.next_down()), code, "{}", format.name);
            assert_eq!(format.code(middle.next_up()), code + 1, "{}", format.name);
        }
    }
}

#[test]
fn random_bits_round_as_in_half() {
    let mut seed = 1;
    for _ in 0..2_000_000 {
        let value = f32::from_bits(random(&mut seed) as u32);
        assert_same_code(FP16, value);
        assert_same_code(BF16, value);
    }
}

#[test]
#[ignore = "all 2^32 inputs, minutes"]
fn all_floats_round_as_in_half() {
    std::thread::scope(|scope| {
        for part in 0..16u32 {
            scope.spawn(move || {
                for bits in part << 28..=part << 28 | 0x0FFF_FFFF {
                    let value = f32::from_bits(bits);
                    assert_same_code(FP16, value);
                    assert_same_code(BF16, value);
                }
            });
        }
    });
}

#[test]
fn outcome_thresholds_are_where_the_rounded_result_changes() {
    for format in FORMATS {
        let zero = f32::from_bits(format.last_zero_bits());
        let normal = f32::from_bits(format.first_normal_bits());
        let over = f32::from_bits(format.first_overflow_bits());
        for (value, expected) in [
            (zero, Outcome::UnderflowToZero),
            (zero.next_up(), Outcome::Subnormal),
            (normal.next_down(), Outcome::Subnormal),
            (normal, Outcome::Normal),
            (over.next_down(), Outcome::Normal),
            (over, Outcome::OverflowToInfinity),
        ] {
            assert_eq!(
                format.outcome(value, 1.0),
                expected,
                "{} {value:e}",
                format.name
            );
            assert_eq!(
                format.outcome(-value, 1.0),
                expected,
                "{} {value:e}",
                format.name
            );
        }
        assert_eq!(format.outcome(-0.0, 8.0), Outcome::ZeroIn);
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(format.outcome(value, 8.0), Outcome::NonfiniteIn);
        }
    }
}

#[test]
fn cuts_say_what_multiplying_and_rounding_says() {
    let mut seed = 7;
    let mut scales: Vec<f32> = (-40..=40).map(|k| 2f32.powi(k)).collect();
    scales.extend([
        3.0,
        1000.0,
        24576.25,
        0.1,
        1.0 / 3.0,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-45,
        0.0,
        f32::INFINITY,
    ]);
    for format in FORMATS {
        for &scale in &scales {
            let cuts = Cuts::new(format, scale);
            let check = |value: f32| {
                assert_eq!(
                    cuts.outcome(value),
                    format.outcome(value, scale),
                    "{} at {scale:e}: {value:e} ({:#010x})",
                    format.name,
                    value.to_bits()
                );
            };
            for cut in [cuts.first_nonzero, cuts.first_normal, cuts.first_overflow] {
                for bits in cut.saturating_sub(2)..=cut.saturating_add(2) {
                    check(f32::from_bits(bits));
                    check(-f32::from_bits(bits));
                }
            }
            for _ in 0..2_000 {
                check(f32::from_bits(random(&mut seed) as u32));
            }
        }
    }
}

#[test]
fn a_format_without_infinity_never_gives_one() {
    for format in FORMATS.into_iter().filter(|f| f.top == Top::Nan) {
        assert!(codes(format).all(|code| !format.value(code).is_infinite()));
        assert!(format.quantize(f32::INFINITY).is_nan());
    }
}

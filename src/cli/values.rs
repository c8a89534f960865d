//! What is typed behind flags: scales, lists of them, shares, sizes.

use super::CliError;

/// The most scales that one list may name.
const MOST_SCALES: usize = 4096;

fn bad(flag: &str, text: &str, found: impl Into<String>, expected: &str) -> CliError {
    CliError::Value {
        flag: flag.to_owned(),
        text: text.to_owned(),
        found: found.into(),
        expected: expected.to_owned(),
    }
}

/// `65536`, `2^16`, `24576.25`: positive and finite.
pub fn scale(flag: &str, text: &str) -> Result<f64, CliError> {
    let expected = "a positive scale such as 65536 or 2^16";
    let value = match text.trim().split_once('^') {
        Some(("2", exponent)) => {
            let exponent: i32 = exponent
                .parse()
                .map_err(|_| bad(flag, text, format!("the exponent {exponent:?}"), expected))?;
            crate::float::exp2(exponent)
        }
        Some((base, _)) => return Err(bad(flag, text, format!("the base {base:?}"), expected)),
        None => text
            .trim()
            .parse()
            .map_err(|_| bad(flag, text, format!("{text:?}"), expected))?,
    };
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(bad(flag, text, format!("{value}"), expected))
    }
}

/// `1,1024,65536` or `2^0..2^24`, or both mixed: f32 scales in the order given.
pub fn scales(flag: &str, text: &str) -> Result<Vec<f32>, CliError> {
    let range = "low..high such as 2^0..2^24";
    // An error in a part quotes the whole text, and names the part.
    let one = |part: &str| {
        scale(flag, part).map_err(|error| match error {
            CliError::Value {
                found, expected, ..
            } => bad(flag, text, found, &expected),
            other => other,
        })
    };
    let mut scales = Vec::new();
    for part in text.split(',') {
        match part.split_once("..") {
            Some((low, high)) => {
                let power = |end: &str| {
                    crate::float::exact_log2(one(end)?).ok_or_else(|| {
                        bad(
                            flag,
                            text,
                            format!("{end}, which is no power of two"),
                            range,
                        )
                    })
                };
                // 2^0..0 is a slip of the pen: its end is a scale of 0.
                if high.trim() == "0" {
                    return Err(bad(flag, text, "an empty range", range));
                }
                let (low, high) = (power(low)?, power(high)?);
                if low > high {
                    return Err(bad(flag, text, "an empty range", range));
                }
                scales.extend((low..=high).map(crate::float::exp2));
            }
            None => scales.push(one(part)?),
        }
        if scales.len() > MOST_SCALES {
            return Err(bad(
                flag,
                text,
                format!("more than {MOST_SCALES} scales"),
                "fewer",
            ));
        }
    }
    let narrowed: Vec<f32> = scales.iter().map(|&s| s as f32).collect();
    match narrowed
        .iter()
        .zip(&scales)
        .find(|(s, _)| **s == 0.0 || s.is_infinite())
    {
        Some((_, wide)) => Err(bad(
            flag,
            text,
            format!("{wide:e}"),
            "a scale that an f32 holds",
        )),
        None => Ok(narrowed),
    }
}

/// `0.01` or `1%`, from 0 to 1.
pub fn share(flag: &str, text: &str) -> Result<f64, CliError> {
    let expected = "a share from 0 to 1, such as 0.001 or 0.1%";
    let (number, unit) = match text.trim().strip_suffix('%') {
        Some(number) => (number.trim(), 100.0),
        None => (text.trim(), 1.0),
    };
    let value = number
        .parse::<f64>()
        .map_err(|_| bad(flag, text, format!("{text:?}"), expected))?
        / unit;
    if (0.0..=1.0).contains(&value) {
        Ok(value)
    } else {
        Err(bad(flag, text, format!("{text:?}"), expected))
    }
}

/// `960x540`.
pub fn size(flag: &str, text: &str) -> Result<(u32, u32), CliError> {
    let expected = "WIDTHxHEIGHT in pixels from 200 to 8000, such as 960x540";
    let wrong = || bad(flag, text, format!("{text:?}"), expected);
    let (width, height) = text.split_once(['x', 'X', '×']).ok_or_else(wrong)?;
    let side = |side: &str| {
        side.trim()
            .parse::<u32>()
            .ok()
            .filter(|s| (200..=8000).contains(s))
            .ok_or_else(wrong)
    };
    Ok((side(width)?, side(height)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_read_as_numbers_powers_and_ranges() {
        assert_eq!(
            scales("--scales", "1,1024,2^16").unwrap(),
            [1.0, 1024.0, 65536.0]
        );
        assert_eq!(
            scales("--scales", "2^-2..2^1").unwrap(),
            [0.25, 0.5, 1.0, 2.0]
        );
        assert_eq!(scales("--scales", "24576.25").unwrap(), [24576.25]);
        assert_eq!(
            scales("--scales", "0.00390625,0.125").unwrap(),
            [0.00390625, 0.125]
        );
    }

    #[test]
    fn wrong_scales_are_refused_with_the_text_quoted() {
        for text in [
            "", "-1", "0", "2^0..0", "2^5..2^3", "3^4", "1e60", "2^2000", "abc", "1..3", "nan",
            "inf", "1,,2",
        ] {
            let message = scales("--scales", text).unwrap_err().to_string();
            assert!(
                message.contains("--scales") && message.contains(&format!("{text:?}")),
                "{text}: {message}"
            );
        }
        let message = scales("--scales", "2^0..0").unwrap_err().to_string();
        assert!(
            message.contains("an empty range") && message.contains("2^0..2^24"),
            "{message}"
        );
    }

    #[test]
    fn shares_read_as_fractions_and_percent() {
        assert_eq!(share("--tolerance", "1%").unwrap(), 0.01);
        assert_eq!(share("--tolerance", "0.5").unwrap(), 0.5);
        for text in ["-1", "2", "x", "101%"] {
            assert!(share("--tolerance", text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_bounded() {
        assert_eq!(size("--size", "960x540").unwrap(), (960, 540));
        for text in ["960", "0x0", "960x99999", "axb"] {
            assert!(size("--size", text).is_err(), "{text}");
        }
    }
}

//! Numbers as people read them.

/// A scale: `2^16` where it is a power of two beyond 1024, else plain.
pub fn scale(value: f64) -> String {
    match crate::float::exact_log2(value) {
        Some(e) if !(-4..=10).contains(&e) => format!("2^{e}"),
        _ if value.is_infinite() => "inf".to_owned(),
        _ => significant(value, 6),
    }
}

/// A number with at most `digits` significant digits, without trailing zeros.
pub fn significant(value: f64, digits: usize) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    if !value.is_finite() {
        return value.to_string();
    }
    let exponent = value.abs().log10().floor() as i32;
    if !(-4..digits as i32 + 3).contains(&exponent) {
        let text = format!("{value:.*e}", digits.saturating_sub(1));
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        return format!("{}e{exponent}", trimmed(mantissa));
    }
    let decimals = (digits as i32 - 1 - exponent).max(0) as usize;
    trimmed(&format!("{value:.decimals$}")).to_owned()
}

fn trimmed(text: &str) -> &str {
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        text
    }
}

/// A count with a blank between thousands.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// "1 step", "2 steps".
pub fn steps(value: u64) -> String {
    format!("{} step{}", count(value), if value == 1 { "" } else { "s" })
}

/// A count in at most five characters: `12.3M`.
pub fn short_count(value: u64) -> String {
    const UNITS: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let mut scaled = value as f64;
    let mut unit = 0;
    while scaled >= 999.5 && unit + 1 < UNITS.len() {
        scaled /= 1000.0;
        unit += 1;
    }
    format!("{}{}", significant(scaled, 3), UNITS[unit])
}

/// A share of `whole` as a percentage; exactly nothing and too small to see are told apart.
pub fn share(part: u64, whole: u64) -> String {
    if part == 0 {
        "0".to_owned()
    } else {
        fraction(part as f64 / whole as f64)
    }
}

/// A fraction as a percentage with three significant digits.
pub fn fraction(value: f64) -> String {
    if value == 0.0 {
        "0".to_owned()
    } else if value < 1e-6 {
        "<1e-4 %".to_owned()
    } else {
        format!("{} %", significant(100.0 * value, 3))
    }
}

/// Two fractions that a third lies between: `0..3 %`, or one percentage where they are equal.
pub fn interval(low: f64, high: f64) -> String {
    let (least, most) = (fraction(low), fraction(high));
    if least == most {
        return least;
    }
    match least.strip_suffix(" %") {
        Some(number) => format!("{number}..{most}"),
        None => format!("{least}..{most}"),
    }
}

/// Rows of cells under headings: the first column left, the others right aligned. Nothing is said by colour.
pub fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = headings.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut out = String::new();
        for (i, (cell, &width)) in cells.zip(&widths).enumerate() {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            let cell = if i == 0 {
                format!("{cell}{pad}")
            } else {
                format!("  {pad}{cell}")
            };
            out.push_str(&cell);
        }
        text.push_str(out.trim_end());
        text.push('\n');
    };
    line(&mut headings.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    text
}

/// A name cut to `width` characters, its middle left out.
pub fn shortened(name: &str, width: usize) -> String {
    let characters: Vec<char> = name
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect();
    if characters.len() <= width {
        return characters.into_iter().collect();
    }
    let head = width.saturating_sub(1) / 2;
    let tail = width.saturating_sub(1) - head;
    let start: String = characters[..head].iter().collect();
    let end: String = characters[characters.len() - tail..].iter().collect();
    format!("{start}…{end}")
}

/// Text made safe for HTML and SVG: names and paths come from strangers' files.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c if c.is_control() && c != '\n' && c != '\t' => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// A text as one CSV field.
pub fn csv_field(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!(significant(0.00123456, 3), "0.00123");
        assert_eq!(significant(123456.0, 3), "123456");
        assert_eq!(significant(1.5e-9, 3), "1.5e-9");
        assert_eq!(significant(12.0, 3), "12");
        assert_eq!(scale(65536.0), "2^16");
        assert_eq!(scale(1000.0), "1000");
        assert_eq!(scale(1.0), "1");
        assert_eq!(count(1234567), "1 234 567");
        assert_eq!(short_count(1_234_567), "1.23M");
        assert_eq!(short_count(999), "999");
        assert_eq!(share(0, 10), "0");
        assert_eq!(fraction(0.0024), "0.24 %");
        assert_eq!(shortened("layers.10.attention.weight", 11), "layer…eight");
    }

    #[test]
    fn tables_line_up() {
        let text = table(
            &["name", "n"],
            &[
                vec!["a".into(), "10".into()],
                vec!["bcdef".into(), "9".into()],
            ],
        );
        assert_eq!(text, "name    n\na      10\nbcdef   9\n");
    }
}

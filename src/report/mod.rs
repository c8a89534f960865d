//! Results as text: JSON for programs, tables for a terminal, one HTML page for people.

pub mod compare;
pub mod csv;
pub mod diagnosis;
pub mod figures;
pub mod html;
pub mod json;
pub mod page;
pub mod table;
pub mod text;

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

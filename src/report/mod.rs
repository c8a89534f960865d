//! Results as text: JSON for programs, tables for a terminal, one HTML page for people.

pub mod csv;
pub mod json;
pub mod table;
pub mod text;

//! Results as text: JSON for programs, tables for a terminal, one HTML page for people.

pub mod compare;
pub mod csv;
pub mod diagnosis;
pub mod figures;
pub mod html;
pub mod json;
pub mod page;
pub mod table;

pub use crate::text::{self, escape};

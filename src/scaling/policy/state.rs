//! Saved states: numbers that JSON cannot hold are text, and a missing field is an error that names it.

use serde_json::{Number, Value as Json};

use super::registry::FAR;
use super::{PolicyError, State};

/// A number as JSON; infinities and NaN as the text `inf`, `-inf`, `nan`, as in the golden traces.
pub(crate) fn number(x: f64) -> Json {
    match Number::from_f64(x) {
        Some(n) => Json::Number(n),
        None if x.is_nan() => Json::from("nan"),
        None if x > 0.0 => Json::from("inf"),
        None => Json::from("-inf"),
    }
}

/// The number that [`number`] wrote, or any JSON number.
pub(crate) fn as_number(json: &Json) -> Option<f64> {
    match json {
        Json::Number(n) => n.as_f64(),
        Json::String(s) => match s.as_str() {
            "inf" => Some(f64::INFINITY),
            "-inf" => Some(f64::NEG_INFINITY),
            "nan" => Some(f64::NAN),
            _ => None,
        },
        _ => None,
    }
}

/// Builds a state field by field: `state([("scale", 1.0.into()), ...])`.
pub(crate) fn state<const N: usize>(fields: [(&str, Json); N]) -> State {
    fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
}

/// Typed access to a state being loaded.
pub(crate) struct Fields<'a> {
    pub policy: &'static str,
    pub state: &'a State,
}

impl<'a> Fields<'a> {
    pub fn new(policy: &'static str, state: &'a State) -> Self {
        Fields { policy, state }
    }

    pub fn f64(&self, field: &str) -> Result<f64, PolicyError> {
        self.state
            .get(field)
            .and_then(as_number)
            .ok_or_else(|| self.bad(field, "a number"))
    }

    pub fn f32(&self, field: &str) -> Result<f32, PolicyError> {
        let x = self.f64(field)?;
        let narrow = x as f32;
        if x.is_nan() || f64::from(narrow) == x {
            Ok(narrow)
        } else {
            Err(self.bad(field, "a number that f32 holds exactly"))
        }
    }

    pub fn i64(&self, field: &str) -> Result<i64, PolicyError> {
        let json = self.state.get(field);
        let integer = json.and_then(|j| j.as_i64().or_else(|| whole(j.as_f64()?)));
        integer
            .filter(|i| (-2 * FAR..=2 * FAR).contains(i))
            .ok_or_else(|| self.bad(field, "an integer within 2^61"))
    }

    /// A window that is taken modulo: at least 1.
    pub fn window(&self, field: &str) -> Result<i64, PolicyError> {
        self.i64(field)
            .ok()
            .filter(|w| *w >= 1)
            .ok_or_else(|| self.bad(field, "an integer, at least 1"))
    }

    pub fn flag(&self, field: &str) -> Result<bool, PolicyError> {
        self.state
            .get(field)
            .and_then(Json::as_bool)
            .ok_or_else(|| self.bad(field, "true or false"))
    }

    pub fn bad(&self, field: &str, expected: &'static str) -> PolicyError {
        let found = self
            .state
            .get(field)
            .map_or_else(|| "nothing".to_owned(), Json::to_string);
        PolicyError::BadState {
            policy: self.policy,
            field: field.to_owned(),
            found,
            expected,
        }
    }
}

/// `x` as an integer where it is one and lies in the range that f64 holds exactly.
pub(crate) fn whole(x: f64) -> Option<i64> {
    (x.fract() == 0.0 && x.abs() <= 9_007_199_254_740_992.0).then_some(x as i64)
}

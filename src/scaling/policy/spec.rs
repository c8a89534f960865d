//! A policy as text: `name[:key=value,...]`, checked when read and built when needed.

use std::borrow::Cow;
use std::fmt;

use super::registry::{Key, PolicyInfo, Settings, Value, find, nearest, policies};
use super::{Policy, PolicyError};

/// Whose defaults fill the keys that were not given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Defaults {
    /// What a user of the framework gets from its config file or command line (`simulate`, `recommend`).
    Framework,
    /// The class's own, as in golden traces (`check`); the framework's where the class makes the key mandatory.
    Class,
}

/// A policy's name and the settings that were typed.
#[derive(Debug, Clone)]
pub struct PolicySpec {
    info: &'static PolicyInfo,
    given: Vec<Given>,
}

/// One setting: the key as typed, which key that is, and its value.
#[derive(Debug, Clone)]
struct Given {
    written: String,
    key: usize,
    value: Value,
    text: String,
}

impl PartialEq for PolicySpec {
    /// The same policy with the same settings, however they were spelt or ordered.
    fn eq(&self, other: &Self) -> bool {
        let sorted = |spec: &PolicySpec| {
            let mut pairs: Vec<(usize, Value)> = spec
                .given
                .iter()
                .map(|g| (g.key, g.value.clone()))
                .collect();
            pairs.sort_by_key(|(key, _)| *key);
            pairs
        };
        self.info.name == other.info.name && sorted(self) == sorted(other)
    }
}

impl fmt::Display for PolicySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.canonical())
    }
}

impl std::str::FromStr for PolicySpec {
    type Err = PolicyError;
    fn from_str(text: &str) -> Result<Self, PolicyError> {
        PolicySpec::parse(text)
    }
}

impl PolicySpec {
    /// Reads `name[:key=value,...]`, such as `pytorch`, `torch-amp:growth_interval=500` or
    /// `deepspeed:scale_window=500,delayed_shift=2`. Scales read as `65536` or `2^16`.
    ///
    /// # Errors
    /// When the name, a key or a value is wrong; the error names the nearest right one. Also when values that are fine
    /// one by one do not go together.
    pub fn parse(text: &str) -> Result<PolicySpec, PolicyError> {
        let (name, settings) = match text.split_once(':') {
            Some((name, settings)) => (name.trim(), settings),
            None => (text.trim(), ""),
        };
        let info = find(name).ok_or_else(|| {
            let known = policies()
                .iter()
                .flat_map(|p| std::iter::once(p.name).chain(p.aliases.iter().copied()));
            let expected = match nearest(name, known) {
                Some(near) => format!("a policy such as \"{near}\""),
                None => "a policy such as \"pytorch\" or \"deepspeed\"".to_owned(),
            };
            PolicyError::UnknownPolicy {
                text: text.to_owned(),
                found: name.to_owned(),
                expected,
            }
        })?;
        let mut spec = PolicySpec {
            info,
            given: Vec::new(),
        };
        for part in settings
            .split(',')
            .map(str::trim)
            .filter(|_| !settings.trim().is_empty())
        {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| PolicyError::NotASetting {
                    text: text.to_owned(),
                    found: part.to_owned(),
                })?;
            let (at, value_of) = spec.read(key.trim(), value.trim())?;
            if spec.given.iter().any(|g| g.key == at) {
                return Err(PolicyError::RepeatedKey {
                    policy: info.json_name().to_owned(),
                    key: info.keys[at].name.to_owned(),
                });
            }
            spec.given.push(Given {
                written: key.trim().to_owned(),
                key: at,
                value: value_of,
                text: value.trim().to_owned(),
            });
        }
        spec.checked()
    }

    /// The policy of this name with nothing set.
    ///
    /// # Errors
    /// When no policy has this name.
    pub fn named(name: &str) -> Result<PolicySpec, PolicyError> {
        PolicySpec::parse(name.split(':').next().unwrap_or(name))
    }

    /// The policy of this name with these arguments, as golden traces and saved configurations give them.
    ///
    /// # Errors
    /// As [`parse`](PolicySpec::parse).
    pub fn from_config(name: &str, config: &super::State) -> Result<PolicySpec, PolicyError> {
        let mut spec = PolicySpec::named(name)?;
        for (key, json) in config {
            let value = match json {
                serde_json::Value::Null => Value::None,
                serde_json::Value::Bool(b) => Value::Flag(*b),
                serde_json::Value::Number(n) => match (n.as_i64(), n.as_f64()) {
                    (Some(i), _) => Value::Integer(i),
                    (None, x) => Value::Real(x.unwrap_or(f64::NAN)),
                },
                serde_json::Value::String(word) => Value::from(word.as_str()),
                _ => {
                    let at = spec.position(key)?;
                    return Err(spec.bad(at, key, &json.to_string()));
                }
            };
            // Checked as a whole at the end: two settings may only make sense together.
            spec.set(key, value)?;
        }
        spec.checked()
    }

    /// Builds the policy, filling what was not given from `defaults`.
    ///
    /// # Errors
    /// When values do not go together; a spec from [`parse`](PolicySpec::parse) or [`with`](PolicySpec::with) has been
    /// checked for that.
    pub fn build(&self, defaults: Defaults) -> Result<Box<dyn Policy>, PolicyError> {
        let values = (0..self.info.keys.len())
            .map(|i| Cow::Borrowed(self.value(i, defaults)))
            .collect();
        (self.info.build)(&Settings {
            info: self.info,
            values,
        })
    }

    /// This spec with one key set to another value.
    ///
    /// # Errors
    /// When the policy has no such key or the value cannot be used.
    pub fn with(&self, key: &str, value: impl Into<Value>) -> Result<PolicySpec, PolicyError> {
        let mut spec = self.clone();
        spec.set(key, value.into())?;
        spec.checked()
    }

    /// The value of a key, given or default.
    ///
    /// # Errors
    /// When the policy has no such key.
    pub fn get(&self, key: &str, defaults: Defaults) -> Result<Value, PolicyError> {
        let at = self.position(key)?;
        Ok(self.value(at, defaults).clone())
    }

    /// Whether the policy has a key of this name.
    pub fn has(&self, key: &str) -> bool {
        self.info.key(key).is_some()
    }

    /// Whether a key was given rather than left to its default.
    pub fn is_given(&self, key: &str) -> bool {
        self.position(key)
            .is_ok_and(|at| self.given.iter().any(|g| g.key == at))
    }

    /// The registry's entry of this policy.
    pub fn info(&self) -> &'static PolicyInfo {
        self.info
    }

    /// The text for JSON: the policy's JSON name and the settings as typed, `pytorch:growth_interval=500`.
    pub fn canonical(&self) -> String {
        let settings: Vec<String> = self
            .given
            .iter()
            .map(|g| format!("{}={}", g.written, g.text))
            .collect();
        if settings.is_empty() {
            self.info.json_name().to_owned()
        } else {
            format!("{}:{}", self.info.json_name(), settings.join(","))
        }
    }

    /// How many clean steps bring growth, in the policy's own counting; `None` where the policy never grows by
    /// interval.
    pub fn growth_interval(&self, defaults: Defaults) -> Option<u64> {
        match self.get("growth_interval", defaults) {
            Ok(Value::Integer(n)) if n >= 1 => Some(n as u64),
            _ => None,
        }
    }

    /// The scale of the first step.
    pub fn init_scale(&self, defaults: Defaults) -> f64 {
        self.build(defaults).map_or(f64::NAN, |p| p.loss_scale())
    }

    /// The keys with their effective values, in the implementation's own names: what `check --exec` sends on reset.
    pub fn config(&self, defaults: Defaults) -> super::State {
        let json = |value: &Value| match value {
            Value::None => serde_json::Value::Null,
            Value::Flag(b) => (*b).into(),
            Value::Integer(i) => (*i).into(),
            Value::Real(x) => super::state::number(*x),
            Value::Word(w) => w.as_ref().into(),
        };
        self.info
            .keys
            .iter()
            .enumerate()
            .map(|(i, k)| (k.name.to_owned(), json(self.value(i, defaults))))
            .collect()
    }

    fn set(&mut self, key: &str, value: Value) -> Result<(), PolicyError> {
        let text = value.to_string();
        let (at, value) = match &value {
            Value::Word(word) => self.read(key, word)?,
            _ => {
                let at = self.position(key)?;
                (
                    at,
                    self.converted(at, key, value)
                        .ok_or_else(|| self.bad(at, key, &text))?,
                )
            }
        };
        let new = Given {
            written: key.to_owned(),
            key: at,
            value,
            text,
        };
        match self.given.iter_mut().find(|g| g.key == at) {
            Some(old) => *old = new,
            None => self.given.push(new),
        }
        Ok(())
    }

    fn value(&self, at: usize, defaults: Defaults) -> &Value {
        let key: &'static Key = &self.info.keys[at];
        match self.given.iter().find(|g| g.key == at) {
            Some(given) => &given.value,
            None if defaults == Defaults::Class => key.class.as_ref().unwrap_or(&key.framework),
            None => &key.framework,
        }
    }

    fn position(&self, key: &str) -> Result<usize, PolicyError> {
        let keys = self.info.keys;
        keys.iter()
            .position(|k| k.name == key)
            .or_else(|| keys.iter().position(|k| k.is_called(key)))
            .ok_or_else(|| {
                let all: Vec<&str> = keys.iter().map(|k| k.name).collect();
                let names = keys
                    .iter()
                    .flat_map(|k| std::iter::once(k.name).chain(k.also.iter().copied()));
                let expected = match (nearest(key, names), all.is_empty()) {
                    (_, true) => "none, it has no keys".to_owned(),
                    (Some(near), _) => {
                        format!("\"{near}\" perhaps, or another of {}", all.join(", "))
                    }
                    (None, _) => format!("one of {}", all.join(", ")),
                };
                PolicyError::UnknownKey {
                    policy: self.info.json_name().to_owned(),
                    found: key.to_owned(),
                    expected,
                }
            })
    }

    /// Which key `key` is, and its value read from text.
    fn read(&self, key: &str, text: &str) -> Result<(usize, Value), PolicyError> {
        let at = self.position(key)?;
        let kind = if self.is_log2(at, key) {
            super::Kind::Scale
        } else {
            self.info.keys[at].kind
        };
        let value = kind.parse(text).and_then(|v| self.converted(at, key, v));
        Ok((at, value.ok_or_else(|| self.bad(at, key, text))?))
    }

    /// A scale given for a key that holds its log2 (guided-diffusion's `initial_lg_loss_scale`).
    fn is_log2(&self, at: usize, written: &str) -> bool {
        written == "init_scale" && self.info.keys[at].name == "initial_lg_loss_scale"
    }

    fn converted(&self, at: usize, written: &str, value: Value) -> Option<Value> {
        if self.is_log2(at, written) {
            let Some(Value::Real(scale)) = super::Kind::Scale.accept(value) else {
                return None;
            };
            return Some(Value::Real(scale.log2()));
        }
        self.info.keys[at].kind.accept(value)
    }

    fn bad(&self, at: usize, key: &str, found: &str) -> PolicyError {
        let kind = if self.is_log2(at, key) {
            super::Kind::Scale
        } else {
            self.info.keys[at].kind
        };
        PolicyError::BadValue {
            policy: self.info.json_name().to_owned(),
            key: key.to_owned(),
            found: found.to_owned(),
            expected: kind.expected(),
        }
    }

    fn checked(self) -> Result<PolicySpec, PolicyError> {
        self.build(Defaults::Framework)?;
        self.build(Defaults::Class)?;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_names_aliases_keys_and_common_words() {
        let spec =
            PolicySpec::parse("torch-amp:growth_interval=500,init_scale=2^10").expect("valid");
        assert_eq!(
            spec.canonical(),
            "pytorch:growth_interval=500,init_scale=2^10"
        );
        assert_eq!(spec.growth_interval(Defaults::Framework), Some(500));
        assert_eq!(spec.init_scale(Defaults::Class), 1024.0);
        let swept = spec.with("growth_interval", 7_u64).expect("valid");
        assert_eq!(
            swept.canonical(),
            "pytorch:growth_interval=7,init_scale=2^10"
        );
        assert_eq!(
            PolicySpec::parse("static:init_scale=0.1")
                .expect("valid")
                .init_scale(Defaults::Class),
            f64::from(0.1_f32)
        );
    }

    #[test]
    fn refuses_with_the_nearest_right_name() {
        let message = |text: &str| PolicySpec::parse(text).expect_err("invalid").to_string();
        assert!(
            message("pytroch").contains("\"pytorch\""),
            "{}",
            message("pytroch")
        );
        assert!(message("pytorch:growth_intervall=3").contains("\"growth_interval\" perhaps"));
        assert!(message("pytorch:growth_interval=x").contains("expected a whole number"));
        assert!(message("pytorch:growth_interval").contains("expected key=value"));
        assert!(message("pytorch:init_scale=0").contains("positive finite"));
        assert!(message("static:scale=1,init_scale=2").contains("twice"));
        assert!(message("static:scale=1e60").contains("f32"));
        assert!(message("").contains("a policy such as"));
        assert!(message("pytorch:,").contains("expected key=value"));
    }

    #[test]
    fn no_text_panics() {
        // Pieces of valid specs in every order of three, and values at every edge.
        let pieces = [
            "pytorch",
            ":",
            ",",
            "=",
            "growth_interval",
            "init_scale",
            "2^",
            "^",
            "-1",
            "1e999",
            "\u{3b1}",
            "none",
            "nan",
            "",
        ];
        for a in pieces {
            for b in pieces {
                for c in pieces {
                    let _ = PolicySpec::parse(&format!("{a}{b}{c}"));
                    let _ = PolicySpec::parse(&format!("deepspeed:{a}={b}{c}"));
                }
            }
        }
        let values = [
            "0",
            "-1",
            "1",
            "9223372036854775807",
            "-9223372036854775808",
            "1e308",
            "5e-324",
            "2^-1074",
            "2^1024",
            "inf",
            "NaN",
            "none",
        ];
        for info in policies() {
            for key in info.keys {
                for value in values {
                    let Ok(spec) =
                        PolicySpec::parse(&format!("{}:{}={value}", info.name, key.name))
                    else {
                        continue;
                    };
                    let mut policy = spec.build(Defaults::Class).expect("checked when parsed");
                    for step in 0..40 {
                        let found_inf = step % 5 == 3;
                        let amax = Some(if found_inf { f32::INFINITY } else { 0.5 });
                        if policy
                            .update(crate::scaling::policy::Observed { found_inf, amax })
                            .is_err()
                        {
                            break;
                        }
                        let saved = policy.save();
                        policy
                            .load(&saved)
                            .unwrap_or_else(|e| panic!("{spec}: {e}"));
                    }
                }
            }
        }
    }

    #[test]
    fn hostile_states_are_refused_or_loaded_but_never_panic() {
        let values = [
            serde_json::json!(null),
            serde_json::json!(-1),
            serde_json::json!(i64::MAX),
            serde_json::json!("nan"),
            serde_json::json!([1]),
        ];
        for info in policies() {
            let spec = PolicySpec::named(info.name).expect("registered");
            let fields: Vec<String> = spec
                .build(Defaults::Class)
                .expect("builds")
                .save()
                .keys()
                .cloned()
                .collect();
            for field in &fields {
                for value in &values {
                    let mut policy = spec.build(Defaults::Class).expect("builds");
                    let mut state = policy.save();
                    state.insert(field.clone(), value.clone());
                    if policy.load(&state).is_ok() {
                        for found_inf in [false, true, false] {
                            let _ = policy.update(crate::scaling::policy::Observed {
                                found_inf,
                                amax: Some(1.0),
                            });
                        }
                    }
                    state.shift_remove(field);
                    assert!(
                        policy.load(&state).is_err(),
                        "{} loads without {field}",
                        info.name
                    );
                }
            }
        }
    }
}

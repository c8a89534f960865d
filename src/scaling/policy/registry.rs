//! The list of policies: names, keys, defaults both ways, and what to know about each.

use std::borrow::Cow;
use std::fmt;

use super::{Policy, PolicyError};

/// The value of one key.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Python's `None`: the thing is off.
    None,
    /// `true` or `false`.
    Flag(bool),
    /// A whole number.
    Integer(i64),
    /// A real number; scales and factors are reals.
    Real(f64),
    /// A word, such as `max`.
    Word(Cow<'static, str>),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::None => f.write_str("none"),
            Value::Flag(b) => write!(f, "{b}"),
            Value::Integer(i) => write!(f, "{i}"),
            Value::Word(w) => f.write_str(w),
            Value::Real(x) => match power_of_two(*x) {
                // Scales such as 4294967296 are what people type; beyond 2^53 and below 2^-10 the power reads better.
                Some(k) if !(-10..=53).contains(&k) => write!(f, "2^{k}"),
                _ if x.fract() == 0.0 && x.abs() < 9e15 => write!(f, "{}", *x as i64),
                _ => write!(f, "{x:?}"),
            },
        }
    }
}

/// k where x = 2^k exactly.
fn power_of_two(x: f64) -> Option<i32> {
    if !(x.is_finite() && x > 0.0) {
        return None;
    }
    let k = x.log2().round();
    (2f64.powi(k as i32) == x).then_some(k as i32)
}

impl From<bool> for Value {
    fn from(x: bool) -> Self {
        Value::Flag(x)
    }
}
impl From<i64> for Value {
    fn from(x: i64) -> Self {
        Value::Integer(x)
    }
}
impl From<i32> for Value {
    fn from(x: i32) -> Self {
        Value::Integer(x.into())
    }
}
impl From<u32> for Value {
    fn from(x: u32) -> Self {
        Value::Integer(x.into())
    }
}
impl From<u64> for Value {
    fn from(x: u64) -> Self {
        Value::Integer(i64::try_from(x).map_or(FAR, |i| i.min(FAR)))
    }
}
impl From<usize> for Value {
    fn from(x: usize) -> Self {
        Value::from(x as u64)
    }
}
impl From<f64> for Value {
    fn from(x: f64) -> Self {
        Value::Real(x)
    }
}
impl From<f32> for Value {
    fn from(x: f32) -> Self {
        Value::Real(x.into())
    }
}
impl From<&str> for Value {
    fn from(x: &str) -> Self {
        Value::Word(Cow::Owned(x.to_owned()))
    }
}

/// Integers are held within this: a count of steps this far away is never reached, and differences cannot overflow.
pub(crate) const FAR: i64 = 1 << 60;

/// What a key's value may be.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Kind {
    /// A positive finite number, `65536` or `2^16`.
    Scale,
    /// A [`Kind::Scale`], or `none`. Zero counts as none where the implementation tests for truth.
    OptionalScale,
    /// A [`Kind::Scale`], or the word `dynamic`.
    ScaleOrDynamic,
    /// A finite number strictly between the two ends.
    Between(f64, f64),
    /// A finite number from the first end to the second, both included.
    Within(f64, f64),
    /// Any finite number.
    Real,
    /// A whole number, not below the least.
    Integer {
        /// The least value that the implementation can run with.
        least: i64,
    },
    /// Any whole number, or `none`.
    OptionalInteger,
    /// `true` or `false`.
    Flag,
    /// One of these words.
    Choice(&'static [&'static str]),
}

impl Kind {
    /// What to write, in words.
    pub fn expected(&self) -> String {
        match self {
            Kind::Scale => "a positive finite number such as 65536 or 2^16".to_owned(),
            Kind::OptionalScale => {
                "a positive finite number such as 65536 or 2^16, or none".to_owned()
            }
            Kind::ScaleOrDynamic => {
                "dynamic, or a positive finite number such as 128 or 2^7".to_owned()
            }
            Kind::Between(low, high) if high.is_infinite() => {
                format!("a finite number above {}", Value::Real(*low))
            }
            Kind::Between(low, high) => format!(
                "a number above {} and below {}",
                Value::Real(*low),
                Value::Real(*high)
            ),
            Kind::Within(low, high) if high.is_infinite() => {
                format!("a finite number, at least {}", Value::Real(*low))
            }
            Kind::Within(low, high) => format!(
                "a number from {} to {}",
                Value::Real(*low),
                Value::Real(*high)
            ),
            Kind::Real => "a finite number".to_owned(),
            Kind::Integer { least: i64::MIN } => "a whole number".to_owned(),
            Kind::Integer { least } => format!("a whole number, at least {least}"),
            Kind::OptionalInteger => "a whole number, or none".to_owned(),
            Kind::Flag => "true or false".to_owned(),
            Kind::Choice(words) => format!("one of {}", words.join(", ")),
        }
    }

    /// Reads the user's text.
    pub(crate) fn parse(&self, text: &str) -> Option<Value> {
        let value = match text {
            "none" | "None" | "null" => Value::None,
            "true" | "True" => Value::Flag(true),
            "false" | "False" => Value::Flag(false),
            _ => match (text.parse::<i64>(), parse_number(text)) {
                (Ok(i), _) => Value::Integer(i),
                (_, Some(x)) => Value::Real(x),
                _ => Value::Word(Cow::Owned(text.to_owned())),
            },
        };
        self.accept(value)
    }

    /// The value in this kind's own type, where it is one of its values.
    pub(crate) fn accept(&self, value: Value) -> Option<Value> {
        let real = match &value {
            Value::Integer(i) => Some(*i as f64),
            Value::Real(x) => Some(*x),
            _ => None,
        };
        let integer = match &value {
            Value::Integer(i) => Some((*i).clamp(-FAR, FAR)),
            Value::Real(x) => super::state::whole(*x),
            _ => None,
        };
        let scale = real.filter(|x| x.is_finite() && *x > 0.0).map(Value::Real);
        match self {
            Kind::Scale => scale,
            Kind::OptionalScale if value == Value::None || real == Some(0.0) => Some(Value::None),
            Kind::OptionalScale => scale,
            Kind::ScaleOrDynamic if value == Value::Word("dynamic".into()) => Some(value),
            Kind::ScaleOrDynamic => scale,
            Kind::Between(low, high) => real
                .filter(|x| x.is_finite() && x > low && x < high)
                .map(Value::Real),
            Kind::Within(low, high) => real
                .filter(|x| x.is_finite() && x >= low && x <= high)
                .map(Value::Real),
            Kind::Real => real.filter(|x| x.is_finite()).map(Value::Real),
            Kind::Integer { least } => integer.filter(|i| i >= least).map(Value::Integer),
            Kind::OptionalInteger if value == Value::None => Some(value),
            Kind::OptionalInteger => integer.map(Value::Integer),
            Kind::Flag => match value {
                Value::Flag(_) => Some(value),
                Value::Integer(0) => Some(Value::Flag(false)),
                Value::Integer(1) => Some(Value::Flag(true)),
                _ => None,
            },
            Kind::Choice(words) => match &value {
                Value::Word(w) if words.contains(&w.as_ref()) => Some(value),
                _ => None,
            },
        }
    }
}

/// Reads `65536`, `1e-3` or `2^16`.
pub(in crate::scaling) fn parse_number(text: &str) -> Option<f64> {
    let text = text.trim();
    let x = match text.split_once('^') {
        Some((base, power)) => {
            let (base, power) = (
                base.trim().parse::<f64>().ok()?,
                power.trim().parse::<i32>().ok()?,
            );
            // Rust's powi may round differently for tiny powers; 2^k is built exactly down to 2^-1074.
            if base == 2.0 {
                exp2(power)
            } else {
                base.powi(power)
            }
        }
        None => text.parse().ok()?,
    };
    x.is_finite().then_some(x)
}

/// 2^k exactly, subnormals included; 0 or infinity outside.
pub(crate) fn exp2(k: i32) -> f64 {
    match k {
        ..-1074 => 0.0,
        -1074..-1022 => f64::from_bits(1 << (k + 1074)),
        -1022..=1023 => f64::from_bits(((k + 1023) as u64) << 52),
        _ => f64::INFINITY,
    }
}

/// One argument of a policy.
#[derive(Debug, Clone)]
pub struct Key {
    /// The implementation's own name.
    pub name: &'static str,
    /// Other names that reach it: the glossary's common words.
    pub also: &'static [&'static str],
    /// What its value may be.
    pub kind: Kind,
    /// The default of the class; `None` where the class makes it mandatory (the framework's is then used).
    pub class: Option<Value>,
    /// What a user of the framework gets from its config file or command line.
    pub framework: Value,
    /// What it does, in a few words.
    pub about: &'static str,
}

impl Key {
    /// A key whose class and framework agree on the default.
    pub(crate) const fn new(
        name: &'static str,
        also: &'static [&'static str],
        kind: Kind,
        default: Value,
        about: &'static str,
    ) -> Key {
        // `Value` has no const clone: the two real kinds and integers cover every shared default.
        let class = match &default {
            Value::None => Value::None,
            Value::Flag(b) => Value::Flag(*b),
            Value::Integer(i) => Value::Integer(*i),
            Value::Real(x) => Value::Real(*x),
            Value::Word(Cow::Borrowed(w)) => Value::Word(Cow::Borrowed(w)),
            Value::Word(Cow::Owned(_)) => Value::None,
        };
        Key {
            name,
            also,
            kind,
            class: Some(class),
            framework: default,
            about,
        }
    }

    /// A key with one default in the class and another in the framework.
    pub(crate) const fn two(
        name: &'static str,
        also: &'static [&'static str],
        kind: Kind,
        class: Value,
        framework: Value,
        about: &'static str,
    ) -> Key {
        Key {
            name,
            also,
            kind,
            class: Some(class),
            framework,
            about,
        }
    }

    /// A key that the class makes mandatory.
    pub(crate) const fn mandatory(
        name: &'static str,
        also: &'static [&'static str],
        kind: Kind,
        framework: Value,
        about: &'static str,
    ) -> Key {
        Key {
            name,
            also,
            kind,
            class: None,
            framework,
            about,
        }
    }

    /// Whether `name` is one of this key's names.
    pub fn is_called(&self, name: &str) -> bool {
        self.name == name || self.also.contains(&name)
    }
}

/// The number type in which an implementation keeps its scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleType {
    /// IEEE binary32.
    F32,
    /// IEEE binary64, a Python float.
    F64,
}

/// A law that a policy is known to break, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exception {
    /// The law's name.
    pub law: &'static str,
    /// What the original does instead.
    pub reason: &'static str,
}

/// A policy of the registry.
#[derive(Debug)]
pub struct PolicyInfo {
    /// The name, as in `reference` and in golden traces.
    pub name: &'static str,
    /// Other names.
    pub aliases: &'static [&'static str],
    /// The type of the scale.
    pub scale_type: ScaleType,
    /// The arguments.
    pub keys: &'static [Key],
    /// One line.
    pub summary: &'static str,
    /// Rule and quirks, several paragraphs.
    pub explanation: &'static str,
    /// Project, file and version whose code this follows.
    pub source: &'static str,
    /// The laws that this policy is known to break.
    pub exceptions: &'static [Exception],
    pub(crate) build: fn(&Settings<'_>) -> Result<Box<dyn Policy>, PolicyError>,
}

impl PolicyInfo {
    /// The name that JSON uses: `pytorch` for `torch-amp`, else [`name`](PolicyInfo::name).
    pub fn json_name(&self) -> &'static str {
        if self.name == "torch-amp" {
            "pytorch"
        } else {
            self.name
        }
    }

    /// The key that goes by this name.
    pub fn key(&self, name: &str) -> Option<&'static Key> {
        self.keys
            .iter()
            .find(|k| k.name == name)
            .or_else(|| self.keys.iter().find(|k| k.is_called(name)))
    }
}

/// A policy's keys with their values: what was typed, else the default.
#[derive(Debug)]
pub(crate) struct Settings<'a> {
    pub info: &'static PolicyInfo,
    pub values: Vec<Cow<'a, Value>>,
}

impl Settings<'_> {
    fn value(&self, key: &str) -> &Value {
        let at = self.info.keys.iter().position(|k| k.name == key);
        at.and_then(|i| self.values.get(i))
            .expect("a policy asks only for keys of its own table")
    }

    pub fn f64(&self, key: &str) -> f64 {
        match self.value(key) {
            Value::Real(x) => *x,
            Value::Integer(i) => *i as f64,
            other => unreachable!("the kind of {key} is a number, found {other}"),
        }
    }

    /// The number rounded to f32; refused where that is no longer positive and finite.
    pub fn f32(&self, key: &str) -> Result<f32, PolicyError> {
        let x = self.f64(key) as f32;
        if x.is_finite() && x > 0.0 {
            Ok(x)
        } else {
            Err(self.bad(key, "a number that f32 holds as positive and finite"))
        }
    }

    pub fn optional(&self, key: &str) -> Option<f64> {
        match self.value(key) {
            Value::Real(x) => Some(*x),
            _ => None,
        }
    }

    pub fn optional_integer(&self, key: &str) -> Option<i64> {
        match self.value(key) {
            Value::Integer(i) => Some(*i),
            _ => None,
        }
    }

    pub fn i64(&self, key: &str) -> i64 {
        match self.value(key) {
            Value::Integer(i) => *i,
            other => unreachable!("the kind of {key} is an integer, found {other}"),
        }
    }

    pub fn flag(&self, key: &str) -> bool {
        matches!(self.value(key), Value::Flag(true))
    }

    pub fn word(&self, key: &str) -> &str {
        match self.value(key) {
            Value::Word(w) => w,
            _ => "",
        }
    }

    pub fn bad(&self, key: &str, expected: &str) -> PolicyError {
        PolicyError::BadValue {
            policy: self.info.json_name().to_owned(),
            key: key.to_owned(),
            found: self.value(key).to_string(),
            expected: expected.to_owned(),
        }
    }
}

/// Every policy, in the order of the list that `gradscale policies` prints.
pub fn policies() -> &'static [&'static PolicyInfo] {
    &[
        &super::torch_amp::INFO,
        &super::fsdp::INFO,
        &super::fixed::INFO,
        &super::apex_amp::INFO,
        &super::apex_fp16_utils::INFO,
        &super::apex_contrib::INFO,
        &super::apex_hysteresis::INFO,
        &super::fairseq::INFO,
        &super::metaseq::INFO,
        &super::deepspeed::INFO,
        &super::deepspeed::LEGACY,
        &super::deepspeed_fp16::FUSED,
        &super::deepspeed_fp16::UNFUSED,
        &super::megatron::INFO,
        &super::colossalai::INFO,
        &super::tf_keras::INFO,
        &super::keras3::TORCH,
        &super::keras3::JAX,
        &super::tf_contrib::INFO,
        &super::paddle::INFO,
        &super::paddle_static_op::INFO,
        &super::flax::INFO,
        &super::jmp::EAGER,
        &super::jmp::JIT,
        &super::mindspore_manager::INFO,
        &super::mindspore_cell::INFO,
        &super::mindspore_scaler::INFO,
        &super::chainer::INFO,
        &super::guided_diffusion::INFO,
        &super::openseq2seq_backoff::INFO,
        &super::openseq2seq_logmax::INFO,
        &super::te_delayed_scaling::INFO,
    ]
}

/// The policy of this name or alias.
pub fn find(name: &str) -> Option<&'static PolicyInfo> {
    policies()
        .iter()
        .copied()
        .find(|p| p.name == name || p.aliases.contains(&name))
}

/// The candidates nearest to what was written, best first, as words: `"pytorch" (did you mean it?)`.
pub(crate) fn nearest<'a>(
    found: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    candidates
        .map(|c| (distance(found, c), c))
        .min_by_key(|(d, _)| *d)
        // Beyond half of its letters a guess only confuses.
        .filter(|(d, c)| *d <= (c.len().max(found.len())) / 2)
        .map(|(_, c)| c)
}

/// Edit distance over bytes; text beyond 64 bytes is cut, it resembles no name of ours.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (
        &a.as_bytes()[..a.len().min(64)],
        &b.as_bytes()[..b.len().min(64)],
    );
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let cost = diagonal + usize::from(!x.eq_ignore_ascii_case(y));
            diagonal = row[j + 1];
            row[j + 1] = cost.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::super::{Defaults, Observed, PolicySpec};
    use super::*;

    #[test]
    fn every_policy_builds_both_ways_and_its_defaults_are_of_their_kind() {
        for info in policies() {
            let spec = PolicySpec::parse(info.name).expect("a bare name is valid");
            for defaults in [Defaults::Class, Defaults::Framework] {
                let scale = spec
                    .build(defaults)
                    .expect("defaults go together")
                    .loss_scale();
                assert!(
                    scale > 0.0 && scale.is_finite(),
                    "{} starts at {scale}",
                    info.name
                );
            }
            for key in info.keys {
                for value in key.class.iter().chain([&key.framework]) {
                    assert_eq!(
                        key.kind.accept(value.clone()).as_ref(),
                        Some(value),
                        "{} {}",
                        info.name,
                        key.name
                    );
                    assert_eq!(
                        key.kind.parse(&value.to_string()).as_ref(),
                        Some(value),
                        "{} {}",
                        info.name,
                        key.name
                    );
                }
            }
        }
    }

    #[test]
    fn no_name_means_two_things() {
        let mut names: Vec<&str> = policies()
            .iter()
            .flat_map(|p| p.aliases.iter().copied().chain([p.name]))
            .collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(
            names.len(),
            policies()
                .iter()
                .map(|p| 1 + p.aliases.len())
                .sum::<usize>()
        );
        for info in policies() {
            let mut keys: Vec<&str> = info
                .keys
                .iter()
                .flat_map(|k| k.also.iter().copied().chain([k.name]))
                .collect();
            keys.sort_unstable();
            let all = keys.len();
            keys.dedup();
            assert_eq!(keys.len(), all, "{}", info.name);
        }
    }

    /// The shared example of the reference: start 64, interval 3, hysteresis 2 where there is one.
    #[test]
    fn the_shared_example_comes_out_as_in_the_reference() {
        let flags = [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0];
        let plain = "64 64 64 128 128 64 64 64 128 128 64 32 32 32 64 64";
        let forgiving = "64 64 64 128 128 128 128 128 256 256 256 128 128 128 256 256";
        let late = "64 64 64 64 128 64 64 64 64 128 64 32 32 32 32 64";
        for (text, expected) in [
            (
                "static:scale=64",
                "64 64 64 64 64 64 64 64 64 64 64 64 64 64 64 64",
            ),
            ("torch-amp:init_scale=64,growth_interval=3", plain),
            ("fsdp:init_scale=64,growth_interval=3,device=cpu", plain),
            ("apex-amp:init_scale=64,growth_interval=3", plain),
            ("apex-fp16-utils:init_scale=64,growth_interval=3", plain),
            (
                "apex-contrib-fp16-optimizer:init_scale=64,growth_interval=3",
                plain,
            ),
            (
                "apex-update-scale-hysteresis:init_scale=64,growth_interval=3,hysteresis=2",
                forgiving,
            ),
            ("fairseq:init_scale=64,growth_interval=3", plain),
            (
                "metaseq:init_scale=64,growth_interval=3",
                "64 64 64 128 128 64 64 64 128 128 64 32 64 128 128 256",
            ),
            // The cut shows at index 11, right after the second overflow of the pair (the reference prints it one later,
            // where no overflow is; the recorded traces decide).
            (
                "deepspeed:init_scale=64,growth_interval=3,hysteresis=2",
                "64 64 64 64 128 128 128 128 128 256 256 128 128 128 128 256",
            ),
            (
                "deepspeed-legacy:init_scale=64,growth_interval=3,hysteresis=2",
                forgiving,
            ),
            ("deepspeed-fp16-fused:init_scale=64,growth_interval=3", late),
            (
                "deepspeed-fp16-unfused:init_scale=64,growth_interval=3",
                late,
            ),
            (
                "megatron:init_scale=64,growth_interval=3,hysteresis=2",
                forgiving,
            ),
            (
                "colossalai:init_scale=64,growth_interval=3,hysteresis=2",
                forgiving,
            ),
            ("tf-keras:init_scale=64,growth_interval=3", plain),
            ("keras3:init_scale=64,growth_interval=3", plain),
            ("paddle:init_scale=64,growth_interval=3", plain),
            ("flax:init_scale=64,growth_interval=3", late),
            ("jmp:init_scale=64,growth_interval=3", plain),
            ("mindspore-manager:init_scale=64,growth_interval=3", plain),
            ("mindspore-cell:init_scale=64,growth_interval=3", plain),
            (
                "mindspore-dynamic-loss-scaler:init_scale=64,growth_interval=3",
                plain,
            ),
            (
                "openseq2seq-backoff:max_scale=64,growth_interval=3",
                "64 64 64 64 64 32 32 32 64 64 32 16 16 16 32 32",
            ),
        ] {
            let mut policy = PolicySpec::parse(text)
                .and_then(|s| s.build(Defaults::Class))
                .expect(text);
            let mut scales = vec![policy.loss_scale().to_string()];
            for flag in flags {
                policy
                    .update(Observed {
                        found_inf: flag == 1,
                        amax: None,
                    })
                    .expect("no terminal state in so few steps");
                scales.push(policy.loss_scale().to_string());
            }
            assert_eq!(scales.join(" "), expected, "{text}");
        }
    }
}

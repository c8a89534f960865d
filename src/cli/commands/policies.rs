//! `gradscale policies`: what there is, with keys and both sets of defaults.

use std::io::{self, Write};

use clap::Args;
use serde_json::{Value as Json, json};

use crate::scaling::policy::{
    Key, PolicyError, PolicyInfo, PolicySpec, ScaleType, Value, policies,
};

/// List the loss-scaling policies, or explain one
#[derive(Debug, Args)]
pub struct PoliciesArgs {
    /// The policy to explain
    #[arg(value_name = "NAME", help = "Policy to explain")]
    pub name: Option<String>,
    /// Print one JSON document
    #[arg(long, help = "Print one JSON document")]
    pub json: bool,
}

/// Why `policies` could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoliciesError {
    /// No such policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The answer could not be written.
    #[error("writing the answer: {0}")]
    Write(#[from] io::Error),
}

/// Runs `policies`: the answer to `out`.
///
/// # Errors
/// When no policy has the name, or the answer could not be written.
pub fn run(
    args: &PoliciesArgs,
    out: &mut dyn Write,
    _err: &mut dyn Write,
) -> Result<u8, PoliciesError> {
    let chosen = args
        .name
        .as_deref()
        .map(PolicySpec::parse)
        .transpose()?
        .map(|s| s.info());
    if args.json {
        let list: Vec<Json> = policies()
            .iter()
            .filter(|p| chosen.is_none_or(|c| c.name == p.name))
            .map(|p| policy_json(p))
            .collect();
        writeln!(
            out,
            "{:#}",
            json!({"schema": "gradscale.policies/1", "policies": list})
        )?;
        return Ok(0);
    }
    match chosen {
        Some(info) => explain(out, info)?,
        None => table(out)?,
    }
    Ok(0)
}

fn default_json(value: &Value) -> Json {
    match value {
        Value::None => Json::Null,
        Value::Flag(b) => (*b).into(),
        Value::Integer(i) => (*i).into(),
        Value::Real(x) => json!(x),
        Value::Word(w) => w.as_ref().into(),
    }
}

fn policy_json(info: &PolicyInfo) -> Json {
    let key = |k: &Key| {
        json!({
            "name": k.name,
            "also": k.also,
            "expected": k.kind.expected(),
            "class_default": k.class.as_ref().map(default_json),
            "mandatory_in_class": k.class.is_none(),
            "framework_default": default_json(&k.framework),
            "about": k.about,
        })
    };
    json!({
        "name": info.name,
        "json_name": info.json_name(),
        "aliases": info.aliases,
        "summary": info.summary,
        "scale_type": match info.scale_type { ScaleType::F32 => "f32", ScaleType::F64 => "f64" },
        "keys": info.keys.iter().map(key).collect::<Vec<Json>>(),
        "exceptions": info.exceptions.iter().map(|e| json!({"law": e.law, "reason": e.reason})).collect::<Vec<Json>>(),
        "explanation": info.explanation,
        "source": info.source,
    })
}

fn class_default(key: &Key) -> String {
    key.class
        .as_ref()
        .map_or_else(|| "mandatory".to_owned(), Value::to_string)
}

/// `init_scale=65536 growth_interval=2000`; `class/framework` where they differ.
fn defaults(info: &PolicyInfo) -> String {
    let words = info.keys.iter().map(|k| {
        let (class, framework) = (class_default(k), k.framework.to_string());
        if class == framework {
            format!("{}={class}", k.name)
        } else {
            format!("{}={class}/{framework}", k.name)
        }
    });
    words.collect::<Vec<String>>().join(" ")
}

fn table(out: &mut dyn Write) -> io::Result<()> {
    let width = policies().iter().map(|p| p.name.len()).max().unwrap_or(0);
    writeln!(
        out,
        "{:<width$}  what it is; key=default, class/framework where they differ",
        "policy"
    )?;
    for info in policies() {
        let aliases = if info.aliases.is_empty() {
            String::new()
        } else {
            format!(" (also {})", info.aliases.join(", "))
        };
        writeln!(out, "{:<width$}  {}{aliases}", info.name, info.summary)?;
        writeln!(out, "{:<width$}    {}", "", defaults(info))?;
    }
    writeln!(
        out,
        "\nuse: name[:key=value,...], such as pytorch:growth_interval=500. The common words growth_interval, init_scale,"
    )?;
    writeln!(
        out,
        "hysteresis, min_scale, max_scale, growth_factor and backoff_factor work wherever the policy has the thing."
    )?;
    writeln!(
        out,
        "simulate and recommend use the framework's defaults, check the class's. `gradscale policies NAME` explains one."
    )
}

fn explain(out: &mut dyn Write, info: &PolicyInfo) -> io::Result<()> {
    writeln!(out, "{}: {}", info.name, info.summary)?;
    if !info.aliases.is_empty() {
        writeln!(out, "also called {}", info.aliases.join(", "))?;
    }
    writeln!(out, "\n{}\n", info.explanation)?;
    let rows: Vec<[String; 4]> =
        std::iter::once(["key", "class", "framework", "meaning"].map(str::to_owned))
            .chain(info.keys.iter().map(|k| {
                let about = if k.also.is_empty() {
                    k.about.to_owned()
                } else {
                    format!("{} (also {})", k.about, k.also.join(", "))
                };
                [
                    k.name.to_owned(),
                    class_default(k),
                    k.framework.to_string(),
                    about,
                ]
            }))
            .collect();
    let width = |column: usize| rows.iter().map(|r| r[column].len()).max().unwrap_or(0);
    let (name, class, framework) = (width(0), width(1), width(2));
    for [key, in_class, in_framework, about] in &rows {
        writeln!(
            out,
            "  {key:<name$}  {in_class:>class$}  {in_framework:>framework$}  {about}"
        )?;
    }
    let kept_in = match info.scale_type {
        ScaleType::F32 => "f32",
        ScaleType::F64 => "f64, a Python float",
    };
    writeln!(out, "\nthe scale is kept in {kept_in}")?;
    for exception in info.exceptions {
        writeln!(
            out,
            "breaks the law {}: {}",
            exception.law, exception.reason
        )?;
    }
    writeln!(out, "source: {}", info.source)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: Option<&str>, json: bool) -> Result<String, PoliciesError> {
        let mut out = Vec::new();
        run(
            &PoliciesArgs {
                name: name.map(str::to_owned),
                json,
            },
            &mut out,
            &mut Vec::new(),
        )?;
        Ok(String::from_utf8(out).expect("text"))
    }

    #[test]
    fn lists_every_policy_and_explains_one() {
        let list = text(None, false).expect("lists");
        assert!(policies().iter().all(|p| list.contains(p.name)));
        assert!(
            list.contains("init_scale=32768/128"),
            "fairseq has two initial scales"
        );
        let one = text(Some("pytorch"), false).expect("explains");
        assert!(one.contains("growth_interval") && one.contains("166") && one.contains("source:"));
        let json: Json =
            serde_json::from_str(&text(Some("flax"), true).expect("prints")).expect("JSON");
        assert_eq!(json["policies"].as_array().map(Vec::len), Some(1));
        assert!(
            text(Some("flux"), false)
                .expect_err("unknown")
                .to_string()
                .contains("flax")
        );
    }
}

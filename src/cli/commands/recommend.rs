//! `gradscale recommend`.

use super::{Reading, choosing, choosing_for, print, print_json};
use crate::cli::args::RecommendArgs;
use crate::cli::{CliError, DONE};
use crate::report::{json, table};
use crate::scaling::{common_interval, recommend};
use serde_json::json;

pub fn run(args: &RecommendArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let options = choosing(&args.choosing)?;
    let mut answers = Vec::new();
    let mut warnings = Vec::new();
    for trace in reading.traces(&args.inputs, args.demo)? {
        let run = reading.run_of(&trace);
        let options = choosing_for(&args.choosing, &options, &trace);
        let answer = recommend(&run, &options).map_err(|source| CliError::Recommend {
            input: trace.label.clone(),
            source,
        })?;
        warnings.extend(answer.warnings.iter().cloned());
        answers.push((trace.label, run, answer));
    }
    let common = common_interval(answers.iter().map(|(.., answer)| answer));
    if args.json {
        let mut each: Vec<serde_json::Value> = answers
            .iter()
            .map(|(_, run, answer)| json::recommendation(answer, run))
            .collect();
        if each.len() == 1 {
            print_json(&each.remove(0))?;
        } else {
            for (value, (label, ..)) in each.iter_mut().zip(&answers) {
                value["input"] = json!(label);
            }
            print_json(&json!({
                "schema": "gradscale.recommend/1",
                "runs": each,
                "common": common.map(|(n, low, high)| json!({"growth_interval": n, "interval": {"low": low, "high": high}})),
                "warnings": json::warnings(&warnings),
            }))?;
        }
    } else {
        for (i, (label, _, answer)) in answers.iter().enumerate() {
            print(&format!(
                "{}{}",
                if i > 0 { "\n" } else { "" },
                table::recommendation(answer, label)
            ))?;
        }
        if answers.len() > 1 {
            print(&match common {
                Some((n, low, high)) => {
                    let end = high.map_or("up".to_owned(), |high| format!("to {high}"));
                    format!(
                        "\nFor all of them: growth_interval {n} (from {low} {end} is as good for each).\n"
                    )
                }
                None => "\nNo interval is as good for all of them.\n".to_owned(),
            })?;
        }
    }
    reading.warn(&warnings);
    Ok(DONE)
}

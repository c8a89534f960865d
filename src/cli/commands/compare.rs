//! `gradscale compare`.

use super::{Reading, choosing, only_counts, print, print_json};
use crate::cli::args::CompareArgs;
use crate::cli::{BAD_NEWS, CliError, DONE, values};
use crate::input::Input;
use crate::report::compare::{Pair, compare};

/// B may be larger than A by this share before it counts as worse, unless --fail-if-worse says otherwise.
const ALLOWED: f64 = 0.1;

pub fn run(args: &CompareArgs) -> Result<u8, CliError> {
    let reading = Reading::new(&args.reading)?;
    let options = choosing(&args.choosing)?;
    let allowed = args
        .fail_if_worse
        .as_deref()
        .map(|text| values::share("--fail-if-worse", text))
        .transpose()?;
    let given = args
        .at
        .as_deref()
        .map(|text| values::scale("--at", text))
        .transpose()?;
    let mut used = None;
    let mut traces = Vec::new();
    for path in [&args.a, &args.b] {
        let input = Input::open(path, &reading.options, reading.skip_bad)?;
        used = input.used_scale(&reading.options)?.or(used);
        let mut found = input.into_traces(&reading.options, reading.backend, &reading.bar)?;
        if found.len() != 1 {
            return Err(CliError::SeveralRuns {
                doing: "comparing",
                found: found.len(),
            });
        }
        only_counts("comparing", &found[0])?;
        traces.append(&mut found);
    }
    let [a, b] = traces.as_slice() else {
        return Err(CliError::SeveralRuns {
            doing: "comparing",
            found: traces.len(),
        });
    };
    let comparison = compare(
        Pair {
            a: a.label.clone(),
            b: b.label.clone(),
        },
        Pair {
            a: &a.trace,
            b: &b.trace,
        },
        reading.run_options,
        &options,
        given.or(used).unwrap_or(1.0),
        allowed.unwrap_or(ALLOWED),
    )?;
    if args.json {
        print_json(&comparison.json())?;
    } else {
        print(&comparison.table())?;
    }
    reading.warn(&comparison.warnings);
    Ok(if comparison.worse && allowed.is_some() {
        BAD_NEWS
    } else {
        DONE
    })
}

//! x
use gradscale::scaling::laws::{Options, check_policy};
use gradscale::scaling::policy::{Defaults, PolicySpec, policies};

#[test]
fn survey() {
    for info in policies() {
        let mut spec = PolicySpec::named(info.name).unwrap();
        if spec.has("growth_interval") {
            spec = spec.with("growth_interval", 8_u64).unwrap();
        }
        let t = std::time::Instant::now();
        let report = check_policy(
            || spec.build(Defaults::Class).unwrap(),
            &Options {
                cases: 1000,
                excuses: info
                    .exceptions
                    .iter()
                    .map(|e| gradscale::scaling::laws::Excuse {
                        law: e.law.into(),
                        reason: e.reason.into(),
                        when_kept: gradscale::scaling::laws::WhenKept::Fail,
                    })
                    .collect(),
                ..Options::default()
            },
        );
        println!("== {} {:?} {:?}", spec, t.elapsed(), report.facts);
        for p in report.failed() {
            let Some(c) = p.counterexample.as_ref() else {
                println!("   {} {:?}", p.name, p.exception);
                continue;
            };
            let h = gradscale::scaling::laws::Case {
                found_inf: c.found_inf.clone(),
                at: 0,
            }
            .to_string();
            println!(
                "   {} @{} [{}] at {:?}: expected {} seen {}",
                p.name,
                p.cases,
                &h[..h.len().min(120)],
                c.at,
                c.expected,
                c.seen
            );
        }
    }
}

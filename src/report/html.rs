//! The report as one HTML file: no network, readable without scripts, in the dark, on paper and on a phone.

use super::page::{RunReport, TensorRow};
use super::{escape, table, text};
use crate::analysis::{HistogramSummary, TensorSummary};
use crate::float::exp2;
use crate::plot::Figure;
use crate::scaling::diagnose::Diagnosis;
use crate::scaling::{Answer, Recommendation, percent};
use std::fmt::Write;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c1c1c;--soft:#5a5a5a;--line:#d8d8d8;--ground:#fff;--card:#f6f7f8;--good:#00785a;--bad:#b34a00;--mark:#0b6aa8}\
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--soft:#a8a8a8;--line:#3a3d42;--ground:#16181b;--card:#202328;--good:#4fd1a8;--bad:#ff9e57;--mark:#6fc1f5}\
figure svg{filter:invert(.92) hue-rotate(180deg)}}\
*{box-sizing:border-box}body{margin:0 auto;max-width:66rem;padding:1.2rem;font:16px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif;color:var(--ink);background:var(--ground)}\
header{border-bottom:1px solid var(--line);margin-bottom:1rem}h1{font-size:1.05rem;font-weight:600;color:var(--soft);margin:.2rem 0}\
h2{font-size:1.9rem;line-height:1.2;margin:.6rem 0 .4rem}h3{font-size:1.15rem;margin:1.8rem 0 .5rem}p{margin:.4rem 0}.soft{color:var(--soft)}\
.good{color:var(--good)}.bad{color:var(--bad)}dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1rem;margin:.8rem 0}dt{color:var(--soft)}dd{margin:0}\
.card{background:var(--card);border-radius:.5rem;padding:.7rem 1rem;margin:.8rem 0}.warn{border-left:4px solid var(--bad)}\
pre{background:var(--card);border-radius:.4rem;padding:.5rem .7rem;margin:.2rem 0 .7rem;white-space:pre-wrap;overflow-wrap:anywhere;font-size:.86rem;user-select:all}\
figure{margin:1rem 0}figure svg{width:100%;height:auto;display:block}figcaption{color:var(--soft);font-size:.85rem}\
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;width:100%}\
th,td{text-align:right;padding:.22rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:9rem}\
th{position:sticky;top:0;background:var(--ground)}th button{all:unset;cursor:pointer}th button:focus-visible{outline:2px solid var(--mark)}th[aria-sort] button{color:var(--mark)}\
details summary{cursor:pointer}@media(max-width:40rem){body{padding:.8rem}h2{font-size:1.45rem}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.5rem}}\
@media print{body{max-width:none;font-size:11px;padding:0}figure,.card,tr{break-inside:avoid}th button::after{content:''}pre{border:1px solid var(--line)}}";

/// Sorts a table by the clicked column; the page is complete without it.
const SCRIPT: &str = "\
for(const t of document.querySelectorAll('table.sortable')){t.querySelectorAll('th').forEach((h,i)=>{const b=h.querySelector('button');if(!b)return;\
b.addEventListener('click',()=>{const up=h.getAttribute('aria-sort')!=='ascending';t.querySelectorAll('th').forEach(o=>o.removeAttribute('aria-sort'));\
h.setAttribute('aria-sort',up?'ascending':'descending');const body=t.tBodies[0];const key=r=>{const c=r.cells[i];const v=c.dataset.v;return v===undefined?c.textContent:parseFloat(v)};\
[...body.rows].sort((a,b)=>{const x=key(a),y=key(b);return(x<y?-1:x>y?1:0)*(up?1:-1)}).forEach(r=>body.append(r))})})}";

/// Renders runs and their figures (in the order of the runs) as one page.
pub fn page(runs: &[(RunReport, Vec<(&'static str, Figure)>)]) -> String {
    let mut html = String::with_capacity(1 << 20);
    let title = match runs {
        [(one, _)] => format!("gradscale: {}", one.label),
        _ => format!("gradscale: {} runs", runs.len()),
    };
    html.push_str("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    html.push_str("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n");
    let _ = write!(
        html,
        "<title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n",
        escape(&title)
    );
    for (run, figures) in runs {
        section(&mut html, run, figures);
    }
    let _ = writeln!(
        html,
        "<footer class=\"soft\"><p>Made by gradscale {}. Counts are exact; every figure's caption says how it was made, and <code>report.json</code> beside this page holds the numbers.</p></footer>",
        env!("CARGO_PKG_VERSION")
    );
    let _ = write!(html, "<script>{SCRIPT}</script>\n</body>\n</html>\n");
    html
}

fn section(html: &mut String, run: &RunReport, figures: &[(&'static str, Figure)]) {
    let answer = run.figures.answer.as_ref();
    let _ = writeln!(
        html,
        "<section>\n<header><h1>{}</h1><p class=\"soft\">{}</p></header>",
        escape(&run.label),
        escape(&run.summary())
    );
    let good = answer.is_some_and(|answer| answer.verdict == Answer::KeepDefault);
    match &run.diagnosis {
        None => {
            let mood = if good { "good" } else { "bad" };
            // The first sentence is the headline, the rest stands under it.
            let headline = run.headline();
            let (headline, rest) = match headline.split_once(": ") {
                Some((head, rest)) if run.only_bounds() => (format!("{head}."), rest.to_owned()),
                _ => (headline, String::new()),
            };
            let _ = writeln!(html, "<h2 class=\"{mood}\">{}</h2>", escape(&headline));
            if let Some(first) = rest.chars().next() {
                let rest = format!("{}{}", first.to_uppercase(), &rest[first.len_utf8()..]);
                let _ = writeln!(html, "<p>{}</p>", escape(&rest));
            }
        }
        Some(diagnosis) => {
            diagnosed(html, diagnosis);
            if let Some((name, figure)) = figures.first().filter(|(name, _)| *name == "history") {
                drawing(html, name, figure);
            }
            if run.run.is_empty() {
                warnings(html, run);
                html.push_str("</section>\n");
                return;
            }
            html.push_str("<h3>Another growth interval?</h3>\n");
            if let Some(answer) = answer {
                let _ = writeln!(html, "<p><b>{}</b></p>", escape(&answer.headline()));
            }
        }
    }
    if let Some(answer) = answer {
        let as_good = answer.as_good().map_or(String::new(), |line| line + " ");
        let _ = writeln!(
            html,
            "<p>{}{}</p>",
            escape(&as_good),
            escape(&table::losses(answer))
        );
        let _ = writeln!(html, "<dl><dt>Why</dt><dd>{}</dd>", escape(&answer.because));
        for line in table::sureness(answer) {
            let (name, rest) = line.split_once(": ").unwrap_or(("", &line));
            let _ = writeln!(html, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(rest));
        }
    } else {
        html.push_str("<dl>");
    }
    let _ = writeln!(
        html,
        "<dt>Does FP16 fit?</dt><dd><b>{}</b>: {}</dd>",
        escape(run.fits.word),
        escape(&run.fits.reason)
    );
    let largest = run
        .histograms
        .as_ref()
        .filter(|_| run.only_bounds())
        .and_then(largest);
    match &run.first_overflow {
        _ if largest.is_some() => {
            let (tensor, until) = largest.unwrap_or_default();
            let _ = writeln!(
                html,
                "<dt>First overflow</dt><dd>above scale {}, in <code>{}</code></dd>",
                text::scale(exp2(until)),
                escape(tensor)
            );
        }
        _ if run.only_bounds() => {}
        Some((step, scale, tensor)) => {
            let tensor = tensor.as_ref().map_or(String::new(), |t| {
                format!(", in <code>{}</code>", escape(t))
            });
            let _ = writeln!(
                html,
                "<dt>First overflow</dt><dd>step {step} at scale {}{tensor}, with the default policy</dd>",
                text::scale(*scale)
            );
        }
        None => html.push_str("<dt>First overflow</dt><dd>none with the default policy</dd>\n"),
    }
    if let Some(answer) = answer
        && let Some((scale, cost)) = &answer.best_static
    {
        let lost = cost.lost_update.map_or(String::new(), |lost| {
            format!("{} of the updates lost, ", percent(answer.measure.of(lost)))
        });
        let margin = table::margin(answer);
        let _ = writeln!(
            html,
            "<dt>Best static scale</dt><dd>{} ({lost}{} skipped{margin})</dd>",
            text::scale(*scale),
            text::steps(cost.skipped)
        );
    }
    if let Some(real) = &run.real {
        let skipped = real
            .steps
            .iter()
            .filter(|step| step.found_inf == Some(true))
            .count();
        let predicted = &run.simulated[0].1.cost;
        let last = real
            .steps
            .last()
            .and_then(|step| step.loss_scale)
            .unwrap_or(f64::NAN);
        let _ = writeln!(
            html,
            "<dt>Really run in FP16</dt><dd>{} skipped, last step at scale {}; the replay of <code>{}</code> says {} skipped, scale {} after the last step</dd>",
            text::steps(skipped as u64),
            text::scale(last),
            escape(&run.simulated[0].0),
            predicted.skipped,
            text::scale(predicted.last_scale)
        );
    }
    html.push_str("</dl>\n");
    warnings(html, run);
    if let Some(answer) = answer.filter(|answer| answer.growth_interval.is_some()) {
        html.push_str("<h3>Settings to copy</h3>\n");
        settings(html, answer);
    }
    for (name, figure) in figures.iter().filter(|(name, _)| *name != "history") {
        drawing(html, name, figure);
    }
    if !run.tensors.is_empty() {
        tensors(html, run);
    }
    if let Some(summary) = &run.histograms {
        flushed(html, summary);
        bounded_tensors(html, run, summary);
    }
    if !run.only_bounds() {
        replays(html, run);
    }
    html.push_str("<h3>How this was computed</h3>\n<p>Each gradient is multiplied by the loss scale in f32 and rounded to FP16 (to nearest, ties to even); what is counted is the rounded result. Magnitudes up to 2^-25 become zero, those from 65520 infinity. Policies are replayed with the exact rules of their frameworks. Lost update is the mean over the steps of 1 where the step was skipped, else the share of nonzero elements flushed to zero at that step's scale, taken from the nearest sampled step.</p>\n</section>\n");
}

fn drawing(html: &mut String, name: &str, figure: &Figure) {
    let _ = writeln!(
        html,
        "<figure id=\"{name}\">{}<figcaption>{}</figcaption></figure>",
        inline(&figure.svg),
        escape(&figure.caption)
    );
}

/// What a log comes to: the verdict, why, and what to do.
fn diagnosed(html: &mut String, diagnosis: &Diagnosis) {
    let mood = if diagnosis.is_bad_news() {
        "bad"
    } else {
        "good"
    };
    let _ = writeln!(
        html,
        "<h2 class=\"{mood}\">{}</h2>\n<dl><dt>Why</dt><dd>{}</dd>",
        escape(&diagnosis.headline()),
        escape(&diagnosis.why)
    );
    for (n, advice) in diagnosis.advice.iter().enumerate() {
        let name = if n == 0 { "Do" } else { "" };
        let _ = writeln!(html, "<dt>{name}</dt><dd>{}</dd>", escape(advice));
    }
    let _ = writeln!(
        html,
        "<dt>The log</dt><dd>{} ({}), {} lines; verdict <code>{}</code></dd>",
        escape(diagnosis.format),
        escape(diagnosis.framework),
        text::count(diagnosis.lines),
        diagnosis.verdict().as_str()
    );
    let mut last = "";
    for (name, fact) in super::diagnosis::facts(diagnosis) {
        let shown = if name == last { "" } else { name };
        let _ = writeln!(html, "<dt>{shown}</dt><dd>{}</dd>", escape(&fact));
        last = name;
    }
    html.push_str("</dl>\n");
}

/// PyTorch's lines in sight, the other frameworks' one click away.
fn settings(html: &mut String, answer: &Recommendation) {
    for setting in &answer.settings {
        let lost = setting.cost.lost_update.map_or(String::new(), |lost| {
            format!(
                " <span class=\"soft\">loses {} of the updates</span>",
                percent(answer.measure.of(lost))
            )
        });
        let text = escape(&setting.text);
        let _ = writeln!(
            html,
            "<div>{}{lost}<pre>{text}</pre></div>",
            setting.framework.label()
        );
        if setting.framework.key() == "pytorch" {
            html.push_str("<details><summary>DeepSpeed, Megatron-LM, fairseq, Accelerate, Lightning, and a truly static scale</summary>\n");
            if let Some(text) = &answer.pytorch_static {
                let _ = writeln!(
                    html,
                    "<div>PyTorch, truly static<pre>{}</pre></div>",
                    escape(text)
                );
            }
        }
    }
    html.push_str("</details>\n");
}

/// The SVG without its XML prologue.
fn inline(svg: &str) -> &str {
    svg.find("<svg").map_or(svg, |start| &svg[start..])
}

fn warnings(html: &mut String, run: &RunReport) {
    let mut seen: Vec<&crate::warning::Warning> = Vec::new();
    for warning in &run.warnings {
        if seen.contains(&warning) {
            continue;
        }
        seen.push(warning);
        let _ = writeln!(
            html,
            "<div class=\"card warn\"><b>{}</b>: {}. <span class=\"soft\">Try: {}.</span></div>",
            escape(&warning.seen),
            escape(&warning.may_mean),
            escape(&warning.try_next)
        );
    }
}

fn tensors(html: &mut String, run: &RunReport) {
    let sampled = run.tensors.iter().any(|row| row.sketch.elements() > 0);
    let at = text::scale(run.figures.scale.0);
    html.push_str("<h3>Tensors, worst first</h3>\n<div class=\"scroll\"><table class=\"sortable\"><thead><tr>");
    let mut headings = vec![
        "tensor".to_owned(),
        "amax".to_owned(),
        format!("headroom at {at}"),
    ];
    if sampled {
        headings.extend(["elements".to_owned(), "zeros".to_owned()]);
        headings.extend(
            run.scales
                .iter()
                .map(|&s| format!("flushed at {}", text::scale(s))),
        );
    }
    for heading in &headings {
        let _ = write!(html, "<th><button>{}</button></th>", escape(heading));
    }
    html.push_str("</tr></thead><tbody>\n");
    for row in &run.tensors {
        tensor(html, row, sampled);
    }
    let _ = writeln!(
        html,
        "</tbody></table></div>\n<p class=\"soft\">amax: largest absolute gradient over all recorded steps. headroom: binades to overflow at scale {at}. flushed: share of the finite nonzero elements of the sampled steps that become zero. Grey rows carry no signal.</p>"
    );
}

fn tensor(html: &mut String, row: &TensorRow, sampled: bool) {
    let class = if row.without_signal {
        " class=\"soft\""
    } else {
        ""
    };
    let _ = write!(
        html,
        "<tr{class}><td><code>{}</code></td>",
        escape(&row.name)
    );
    let mut cell = |value: Option<f64>, shown: String| {
        let key = value.filter(|v| v.is_finite()).unwrap_or(-1e300);
        let _ = write!(html, "<td data-v=\"{key}\">{}</td>", escape(&shown));
    };
    let amax = row.amax.map(f64::from);
    cell(
        amax,
        amax.map_or("-".to_owned(), |a| text::significant(a, 3)),
    );
    cell(
        row.headroom_log2,
        row.headroom_log2
            .map_or("-".to_owned(), |h| format!("{h:.1}")),
    );
    if sampled {
        let sketch = &row.sketch;
        cell(
            Some(sketch.elements() as f64),
            text::short_count(sketch.elements()),
        );
        let zeros = if sketch.elements() == 0 {
            0.0
        } else {
            sketch.zeros() as f64 / sketch.elements() as f64
        };
        cell(Some(zeros), text::fraction(zeros));
        for &share in &row.underflow {
            cell(Some(share), text::fraction(share));
        }
    }
    html.push_str("</tr>\n");
}

/// The tensor that overflows first, and the largest power of two at which it does not.
fn largest(summary: &HistogramSummary) -> Option<(&str, i32)> {
    let until = summary.fits_until_log2?;
    let amax = |tensor: &&TensorSummary| tensor.bounded.largest().unwrap_or(0.0);
    let tensor = summary
        .tensors
        .iter()
        .max_by(|a, b| amax(a).total_cmp(&amax(b)))?;
    Some((&tensor.name, until))
}

/// Tensors that become zero as a whole, by name.
fn flushed(html: &mut String, summary: &HistogramSummary) {
    let flushed = summary.wholly_flushed();
    if flushed.is_empty() {
        return;
    }
    let _ = writeln!(
        html,
        "<h3>Flushed as a whole</h3>\n<p>{} of {} tensors become zero entirely at scale 1: their largest element is at most 2^-25. In a bias in front of a normalisation layer that is harmless: its true gradient is zero, and what is lost is rounding noise. Any other tensor among them does not train without a loss scale.</p>\n<ul>",
        flushed.len(),
        summary.tensors.len()
    );
    for tensor in flushed {
        let amax = tensor.bounded.largest().unwrap_or(0.0);
        let _ = writeln!(
            html,
            "<li><code>{}</code>: amax {}, representable from scale {}</li>",
            escape(&tensor.name),
            text::significant(amax.into(), 3),
            text::scale(exp2(tensor.flushed_until_log2.unwrap_or(0)))
        );
    }
    html.push_str("</ul>\n");
}

fn bounded_tensors(html: &mut String, run: &RunReport, summary: &HistogramSummary) {
    let at = run.figures.scale.0;
    html.push_str("<h3>Tensors, as their histograms bound them, worst first</h3>\n<div class=\"scroll\"><table class=\"sortable\"><thead><tr>");
    let mut headings = vec![
        "tensor".to_owned(),
        "amax".to_owned(),
        format!("headroom at {}", text::scale(at)),
        "elements".to_owned(),
        "zeros".to_owned(),
    ];
    headings.extend(
        run.scales
            .iter()
            .map(|&s| format!("flushed at {}", text::scale(s))),
    );
    for heading in &headings {
        let _ = write!(html, "<th><button>{}</button></th>", escape(heading));
    }
    html.push_str("</tr></thead><tbody>\n");
    let mut tensors: Vec<&TensorSummary> = summary.tensors.iter().collect();
    let flushed = |tensor: &TensorSummary| {
        let spread = tensor.bounded.spreads.iter();
        spread
            .clone()
            .find(|spread| f64::from(spread.loss_scale) == at)
            .map_or((0.0, 0.0), |spread| spread.underflow_fraction())
    };
    tensors.sort_by(|a, b| {
        let (a, b) = (flushed(a), flushed(b));
        b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    for tensor in tensors {
        let bounded = &tensor.bounded;
        let _ = write!(html, "<tr><td><code>{}</code></td>", escape(&tensor.name));
        let mut cell = |key: f64, shown: String| {
            let _ = write!(html, "<td data-v=\"{key}\">{}</td>", escape(&shown));
        };
        let amax = f64::from(bounded.largest().unwrap_or(0.0));
        cell(amax, table::bounded_amax(bounded));
        let headroom = (65520.0 / (amax * at)).log2();
        if amax > 0.0 {
            cell(headroom, format!("{headroom:.1}"));
        } else {
            cell(-1e300, "-".to_owned());
        }
        cell(bounded.elements as f64, text::short_count(bounded.elements));
        let whole = bounded.elements.max(1) as f64;
        let (low, high) = bounded.zeros();
        cell(
            high as f64 / whole,
            text::interval(low as f64 / whole, high as f64 / whole),
        );
        for &scale in &run.scales {
            let at = bounded
                .spreads
                .iter()
                .find(|spread| f64::from(spread.loss_scale) == scale);
            match at.map(|spread| spread.underflow_fraction()) {
                Some((low, high)) => cell(high, text::interval(low, high)),
                None => cell(-1e300, "-".to_owned()),
            }
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody></table></div>\n<p class=\"soft\">amax: largest absolute gradient over all logged steps. headroom: binades to overflow. zeros, flushed: least to most that the bins allow, of all elements and of the finite nonzero ones; where inside lies the truth, a histogram does not say.</p>\n");
}

fn replays(html: &mut String, run: &RunReport) {
    html.push_str("<h3>Replays</h3>\n<div class=\"scroll\"><table><thead><tr>");
    for heading in [
        "policy",
        "skipped",
        "at start",
        "growths",
        "first scale",
        "last scale",
        "flushed",
        "lost update",
    ] {
        let _ = write!(html, "<th>{heading}</th>");
    }
    html.push_str("</tr></thead><tbody>\n");
    for (policy, simulated) in &run.simulated {
        let cost = &simulated.cost;
        let bounds = &simulated.skipped;
        let skipped = if bounds.low == bounds.high {
            cost.skipped.to_string()
        } else {
            format!("{} ({}–{})", cost.skipped, bounds.low, bounds.high)
        };
        let share = |lost: Option<crate::tally::Lost>| {
            lost.map_or("-".to_owned(), |lost| text::fraction(lost.elements))
        };
        let _ = writeln!(
            html,
            "<tr><td><code>{}</code></td><td>{skipped}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(policy),
            cost.skipped_at_start,
            cost.growths,
            text::scale(cost.first_scale),
            text::scale(cost.last_scale),
            share(cost.underflow),
            share(cost.lost_update)
        );
    }
    html.push_str("</tbody></table></div>\n");
}

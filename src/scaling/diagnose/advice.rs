//! What to say: why this verdict and not its neighbour, and what to do in the framework at hand.

use super::verdict::Verdict;
use super::{Diagnosis, FilledKind};
use crate::text::{self, count};

/// Why, in a few sentences.
pub fn why(diagnosis: &Diagnosis) -> String {
    let Some(first) = diagnosis.held.first() else {
        return String::new();
    };
    let mut text = sentence(&first.because);
    for held in diagnosis.held.iter().skip(1) {
        text.push(' ');
        text.push_str(&format!(
            "{}: {}",
            held.verdict.as_str(),
            sentence(&held.because)
        ));
    }
    if let Some(not) = neighbour(diagnosis) {
        text.push(' ');
        text.push_str(&sentence(&not));
    }
    text
}

fn sentence(text: &str) -> String {
    let mut characters = text.chars();
    match characters.next() {
        None => String::new(),
        Some(first) => {
            let mut sentence: String = first.to_uppercase().collect();
            sentence.push_str(characters.as_str());
            if !sentence.ends_with('.') {
                sentence.push('.');
            }
            sentence
        }
    }
}

/// Why the verdict next to this one was not given.
fn neighbour(diagnosis: &Diagnosis) -> Option<String> {
    let said = match diagnosis.verdict() {
        Verdict::RampUpHarmless => {
            "not a divergence: the overflows lie in the first steps and the loss goes on after them"
        }
        Verdict::SawtoothAtCeiling => {
            "not a failure: each overflow follows a growth, and the scale comes back to the same ceiling"
        }
        Verdict::Healthy => "not a ramp-up and no sawtooth: overflows are too few for either",
        Verdict::OverflowOutpacesGrowth => {
            "not genuine NaN: the loss stays finite and clean steps lie between the overflows"
        }
        Verdict::DivergenceEvent => {
            "not a ramp-up: the run had long been going, and the loss rose with the overflows"
        }
        Verdict::PinnedAtFloor => "not a ramp-up: there are no clean steps at the end",
        _ => return None,
    };
    Some(said.to_owned())
}

/// What to do, the most important first.
pub fn advice(diagnosis: &Diagnosis) -> Vec<String> {
    let mut advice: Vec<String> = Vec::new();
    let mut say = |text: String| advice.push(text);
    let framework = diagnosis.framework;
    match diagnosis.verdict() {
        Verdict::GenuineNonfinite => {
            say("look for the first non-finite tensor, in the forward pass and in the data; do not touch the loss scale".to_owned());
            say(
                "run one step in bf16 or fp32: if the loss is NaN there too, FP16 is not to blame"
                    .to_owned(),
            );
        }
        Verdict::StepsNotSkipped => {
            say("make the optimizer skip a step whose gradients are not finite; until then every overflow writes inf or NaN into the weights".to_owned());
            if framework == "MindSpore" {
                say("MindYOLO: set ms_overflow_drop / overflow_still_update: False in the configuration".to_owned());
            }
            say("go back to a checkpoint from before the first such line".to_owned());
        }
        Verdict::DivergenceEvent => {
            say("lower the learning rate or clip the gradients, and go back to a checkpoint from before the blow-up".to_owned());
            say("leave the loss scale alone: it only followed".to_owned());
        }
        Verdict::RankDesync => {
            say("see that found_inf is reduced over all ranks before the step, and that every rank loads the same scaler state".to_owned());
            say("prefix each process's log with its rank, and read one rank at a time".to_owned());
        }
        Verdict::PinnedAtFloor => {
            say("if the loss is NaN, look for the first non-finite tensor; else the policy falls faster than it climbs: shorten the growth interval, clip, or lower the learning rate".to_owned());
            say(settings(framework, "a shorter interval", 200));
        }
        Verdict::ScaleSaturatedHigh => {
            say("cap the scale, or take a static one: a growth interval this short lets the scale run away".to_owned());
            say(settings(framework, "the usual interval", 2000));
        }
        Verdict::SawtoothAtCeiling => {
            let lost = match diagnosis.growth_interval {
                Some(interval) if interval.steps > 0 => format!(
                    "nothing to do: about one step in {} is lost ({}), and that is by design",
                    interval.steps + 1,
                    percent(1.0 / (interval.steps as f64 + 1.0))
                ),
                _ => "nothing to do: one step a growth window is lost, and that is by design"
                    .to_owned(),
            };
            say(lost);
        }
        Verdict::RampUpHarmless => {
            say("ignore them".to_owned());
            if let Some((octaves, scale)) = lower_start(diagnosis) {
                say(format!(
                    "or start the scale {octaves} octaves lower, at {}: {}",
                    plain(scale),
                    start(framework, scale)
                ));
            }
        }
        Verdict::OverflowOutpacesGrowth => {
            say("shorten the growth interval or clip the gradients; gradscale recommend says which interval, from the gradients themselves".to_owned());
            say(settings(framework, "a shorter interval", 200));
        }
        Verdict::Healthy => say("nothing to do".to_owned()),
        Verdict::RankDuplicates | Verdict::DisplayRounding | Verdict::CountersUnreliable => {
            say("nothing to do".to_owned());
        }
        Verdict::NotLossScaling => {
            say("if this is an FP16 run, print the scale once an optimizer step:".to_owned());
            say(line_to_add(framework));
        }
        Verdict::InsufficientEvidence => {
            say("add this line where the optimizer steps, and diagnose the new log:".to_owned());
            say(line_to_add(framework));
        }
    }
    if !diagnosis.shape.unrestored.is_empty() {
        say("save and load the scaler's state with the checkpoint: the scale fell back to its start on resuming".to_owned());
    }
    advice
}

/// The exact line that makes the next log tell.
fn line_to_add(framework: &str) -> String {
    match framework {
        "Hugging Face Trainer" => "in a TrainerCallback: def on_step_end(self, args, state, control, **kw): print(f\"step {state.global_step} loss_scale {trainer.accelerator.scaler.get_scale()}\", flush=True)".to_owned(),
        "Accelerate" => "after optimizer.step(): print(f\"step {step} loss_scale {accelerator.scaler.get_scale()} skipped {accelerator.optimizer_step_was_skipped}\", flush=True)".to_owned(),
        "Lightning" => "in on_train_batch_end: print(f\"step {trainer.global_step} loss_scale {trainer.precision_plugin.scaler.get_scale()}\", flush=True)".to_owned(),
        "DeepSpeed" => "after engine.step(): print(f\"step={engine.global_steps}, skipped={engine.skipped_steps}, loss_scale={engine.optimizer.cur_scale}\", flush=True)".to_owned(),
        "Megatron-LM" => "--log-interval 1 (the loss scale is printed unless --no-log-loss-scale-to-tensorboard and its like hide it)".to_owned(),
        "apex" => "print(f\"step {step} loss {loss.item()} loss_scale {amp._amp_state.loss_scalers[0].loss_scale()}\", flush=True)".to_owned(),
        "fairseq" => "--log-interval 1".to_owned(),
        "Paddle" => "print(f\"step {step} loss {float(loss)} loss_scale {float(scaler.get_loss_scaling())}\", flush=True)".to_owned(),
        _ => "after scaler.update(): print(f\"step {step} loss {loss.item()} loss_scale {scaler.get_scale()}\", flush=True)".to_owned(),
    }
}

/// Where the interval is set.
fn settings(framework: &str, what: &str, interval: u64) -> String {
    let text = match framework {
        "DeepSpeed" => format!("\"fp16\": {{\"loss_scale_window\": {interval}}} in the DeepSpeed configuration"),
        "Megatron-LM" => format!("--loss-scale-window {interval}"),
        "fairseq" | "metaseq" => format!("--fp16-scale-window {interval}"),
        "fairseq2" => format!("fp16_scale_window: {interval}"),
        "Paddle" => format!("paddle.amp.GradScaler(incr_every_n_steps={interval})"),
        "apex" => "apex's scale_window is fixed at 2000 in amp; torch.amp.GradScaler(growth_interval=…) can be set".to_owned(),
        _ => format!("torch.amp.GradScaler(growth_interval={interval})"),
    };
    format!("{what}, to begin with: {text}")
}

/// Where the start is set.
fn start(framework: &str, scale: f64) -> String {
    let power = scale.log2().round();
    match framework {
        "DeepSpeed" => {
            format!("\"fp16\": {{\"initial_scale_power\": {power}}} in the DeepSpeed configuration")
        }
        "Megatron-LM" => format!("--initial-loss-scale {}", plain(scale)),
        "fairseq" | "metaseq" => format!("--fp16-init-scale {}", plain(scale)),
        "Paddle" => format!("paddle.amp.GradScaler(init_loss_scaling={})", plain(scale)),
        "apex" => format!(
            "amp.initialize(…, max_loss_scale={}) caps it there",
            plain(scale)
        ),
        _ => format!("torch.amp.GradScaler(init_scale={})", plain(scale)),
    }
}

/// By how many octaves the scale fell at the start, and where it settled.
fn lower_start(diagnosis: &Diagnosis) -> Option<(u64, f64)> {
    let events = diagnosis
        .events
        .iter()
        .filter(|e| e.kind == FilledKind::Overflow);
    let mut low: Option<f64> = None;
    let mut high: Option<f64> = None;
    for event in events {
        if let Some(before) = event.before {
            high = Some(high.map_or(before, |h| h.max(before)));
        }
        if let Some(after) = event.after {
            low = Some(low.map_or(after, |l| l.min(after)));
        }
    }
    let (low, high) = (low?, high?);
    let octaves = if diagnosis.log2 {
        high - low
    } else {
        (high / low).log2()
    };
    let scale = if diagnosis.log2 { low.exp2() } else { low };
    (octaves >= 0.5 && scale.is_finite() && scale > 0.0).then(|| (octaves.round() as u64, scale))
}

fn plain(scale: f64) -> String {
    if scale >= 1.0 && scale.fract() == 0.0 && scale < 1e15 {
        format!("{scale:.0}")
    } else {
        format!("{scale}")
    }
}

fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

impl Diagnosis {
    /// The first words: what it is.
    pub fn headline(&self) -> String {
        let diagnosis = self;
        let skipped = match (diagnosis.skipped_steps, diagnosis.skipped_min) {
            (Some(1), _) => "1 step skipped".to_owned(),
            (Some(n), _) => format!("{} steps skipped", count(n)),
            (None, Some(1)) => "at least 1 step skipped".to_owned(),
            (None, Some(n)) if n > 0 => format!("at least {} steps skipped", count(n)),
            (None, Some(_)) => "no skipped step seen".to_owned(),
            (None, None) => "no count of skipped steps".to_owned(),
        };
        let scale = match (diagnosis.first_scale, diagnosis.last_scale) {
            (Some(first), Some(last)) if first == last => {
                format!(", scale {}", diagnosis.shown_scale(last))
            }
            (Some(first), Some(last)) => format!(
                ", scale {} -> {}",
                diagnosis.shown_scale(first),
                diagnosis.shown_scale(last)
            ),
            _ => String::new(),
        };
        let words = match diagnosis.verdict() {
            Verdict::GenuineNonfinite => {
                "Failure: inf or NaN is made in the model or the data, not by the scale"
            }
            Verdict::StepsNotSkipped => "Failure: updates with inf or NaN are applied",
            Verdict::DivergenceEvent => "Failure: the loss blew up, and the scale followed",
            Verdict::RankDesync => "Failure: several scalers with different scales",
            Verdict::PinnedAtFloor => {
                "Failure: the scale is at its floor and steps overflow all the same"
            }
            Verdict::ScaleSaturatedHigh if diagnosis.is_bad_news() => {
                "Failure: the scale ran away to infinity"
            }
            Verdict::ScaleSaturatedHigh => "Harmless so far: the scale grows without resistance",
            Verdict::SawtoothAtCeiling => "Normal: the scale keeps touching its ceiling",
            Verdict::RampUpHarmless => {
                "Normal: overflows at the start, while the scale finds its level"
            }
            Verdict::OverflowOutpacesGrowth => {
                "Worth a change: the scale falls faster than it climbs"
            }
            Verdict::Healthy => "Healthy",
            Verdict::RankDuplicates | Verdict::DisplayRounding | Verdict::CountersUnreliable => {
                "Nothing but oddities of printing"
            }
            Verdict::NotLossScaling => "No loss scaling here",
            Verdict::InsufficientEvidence => "cannot tell",
        };
        match diagnosis.verdict() {
            Verdict::NotLossScaling => format!("{words}."),
            Verdict::InsufficientEvidence
                if diagnosis.first_scale.is_none() && diagnosis.skipped_steps.is_none() =>
            {
                format!("{words}.")
            }
            _ => format!("{words} ({skipped}{scale})."),
        }
    }

    /// A scale of the log, as people read it.
    pub fn shown_scale(&self, value: f64) -> String {
        if self.log2 {
            format!("2^{}", text::significant(value, 8))
        } else {
            text::scale(value)
        }
    }
}

//! Histories of imagined runs, and how each framework would print them.

use std::fmt::Write;

/// What happens to the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Story {
    /// A ramp at the start, then perhaps a tooth a growth window.
    Healthy,
    /// After a healthy time every gradient and every loss is NaN.
    Collapse,
}

/// Numbers that a seed gives (SplitMix64).
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(
            seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .wrapping_add(0x1234_5678),
        )
    }
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.within(0, of.len() as u64 - 1) as usize]
    }
}

/// One optimizer step.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub n: u64,
    pub overflow: bool,
    /// Hysteresis was spent instead of scale.
    pub kept: bool,
    pub grew: bool,
    pub before: f64,
    pub after: f64,
    pub loss: f64,
}

/// A run as it went.
pub struct Run {
    pub steps: Vec<Step>,
    pub interval: u64,
    pub hysteresis: u64,
    /// The framework's terminal error ended it.
    pub stopped: bool,
    pub window: u64,
}

/// How a framework prints a run.
pub struct Writer {
    pub name: &'static str,
    pub init: (u64, u64),
    pub hysteresis: bool,
    /// The scale stays there, or the framework gives up.
    pub floor: Option<(f64, bool)>,
    /// The lowest ceiling, as log2.
    pub least: f64,
    pub intervals: &'static [u64],
    pub write: fn(&Run, &mut Dice, &mut String),
}

fn run(writer: &Writer, story: Story, dice: &mut Dice) -> Run {
    let healthy = dice.within(150, 400);
    let sick = dice.within(70, 130);
    let length = if story == Story::Collapse {
        healthy + sick
    } else {
        healthy
    };
    let init = dice.within(writer.init.0, writer.init.1) as f64;
    // As far down as the start region is long, and no gradient is larger than FP16's range lets it be.
    let least = writer
        .floor
        .map_or(writer.least, |(floor, _)| floor.log2().max(writer.least));
    let ceiling = (init - dice.within(0, 20) as f64).max(least) + 0.5;
    let interval = dice.pick(writer.intervals);
    let most = if writer.hysteresis {
        dice.within(1, 2)
    } else {
        1
    };
    let window = dice.pick(&[1, 1, 5, 10, 20]);
    let (mut scale, mut clean, mut left) = (init, 0, most);
    let mut steps = Vec::new();
    let start = 4.0 + 6.0 * dice.share();
    let mut stopped = false;
    for n in 1..=length {
        let nan = n > healthy;
        let overflow = nan || scale > ceiling;
        let before = scale;
        let mut grew = false;
        let mut kept = false;
        if overflow {
            clean = 0;
            if left > 1 {
                left -= 1;
                kept = true;
            } else if let Some((floor, gives_up)) = writer.floor
                && scale - 1.0 < floor.log2()
            {
                kept = true;
                if gives_up {
                    stopped = true;
                    break;
                }
            } else {
                scale -= 1.0;
            }
        } else {
            clean += 1;
            if clean % interval == 0 {
                scale += 1.0;
                left = most;
                grew = true;
            }
        }
        let loss = if nan {
            f64::NAN
        } else {
            start * (0.4 + 0.6 * (-(n as f64) / 150.0).exp()) * (0.97 + 0.06 * dice.share())
        };
        steps.push(Step {
            n,
            overflow,
            kept,
            grew,
            before: before.exp2(),
            after: scale.exp2(),
            loss,
        });
    }
    Run {
        steps,
        interval,
        hysteresis: most,
        stopped,
        window,
    }
}

/// A log of this story, and the run it tells of.
pub fn tell(writer: &Writer, story: Story, seed: u64) -> (String, Run) {
    let mut dice = Dice::new(
        seed ^ writer
            .name
            .bytes()
            .fold(0, |h: u64, b| h.wrapping_mul(131).wrapping_add(b.into())),
    );
    let run = run(writer, story, &mut dice);
    let mut log = String::new();
    (writer.write)(&run, &mut dice, &mut log);
    (log, run)
}

/// A Python float.
pub fn py(value: f64) -> String {
    if value == 0.0 || (1e-4..1e16).contains(&value) {
        format!("{value:?}")
    } else {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').expect("an exponent");
        let (sign, power) = match exponent.strip_prefix('-') {
            Some(power) => ("-", power),
            None => ("+", exponent),
        };
        format!("{digits}e{sign}{power:0>2}")
    }
}

fn nan(value: f64, decimals: usize) -> String {
    if value.is_nan() {
        "nan".to_owned()
    } else {
        format!("{value:.decimals$}")
    }
}

fn stamp(n: u64, milli: u64) -> String {
    format!(
        "2024-03-{:02} {:02}:{:02}:{:02},{milli:03}",
        1 + n / 43_200 % 28,
        n / 1800 % 24,
        n * 2 / 60 % 60,
        n * 2 % 60
    )
}

/// Each event in the words of `line`, copied by `ranks` processes, some of them glued together.
fn copies(log: &mut String, dice: &mut Dice, ranks: u64, line: &str) {
    for _ in 0..ranks {
        log.push_str(line);
        if ranks == 1 || dice.within(0, 5) > 0 {
            log.push('\n');
        }
    }
    if !log.ends_with('\n') {
        log.push('\n');
    }
}

fn plain_progress(log: &mut String, run: &Run, step: &Step) {
    if step.n.is_multiple_of(run.window) {
        let _ = writeln!(
            log,
            "step {} | loss {} | lr 5.000e-05 | 1.92 it/s",
            step.n,
            nan(step.loss, 4)
        );
    }
}

fn deepspeed(run: &Run, dice: &mut Dice, log: &mut String) {
    let old = dice.within(0, 2) == 0;
    let ranks = if old { dice.pick(&[1, 1, 2, 4]) } else { 1 };
    let bars = dice.within(0, 1) == 0;
    let (mut skipped, mut left) = (0, run.hysteresis);
    for step in &run.steps {
        if bars {
            let _ = write!(
                log,
                "\r  1%|#      | {}/5000 [00:{:02}<1:08:10,  3.50s/it]",
                step.n,
                step.n % 60
            );
        }
        if step.overflow {
            skipped += 1;
            for rank in 0..ranks {
                let head = format!(
                    "[{}] [INFO] [loss_scaler.py:188:update_scale]",
                    stamp(step.n, rank)
                );
                if old {
                    let _ = writeln!(
                        log,
                        "{head} [deepscale] OVERFLOW! Rank {rank} Skipping step. Attempted loss scale: {}, reducing to {}",
                        py(step.before),
                        py(step.after)
                    );
                } else if step.kept && left > 1 {
                    let _ = writeln!(
                        log,
                        "{head} [deepspeed] OVERFLOW! Rank {rank} Skipping step. Attempted loss scale: {}, but hysteresis is 2. Reducing hysteresis to 1",
                        step.before
                    );
                } else {
                    let _ = writeln!(
                        log,
                        "{head} [deepspeed] OVERFLOW! Rank {rank} Skipping step. Attempted loss scale: {}, reducing to {}",
                        step.before, step.after
                    );
                }
            }
            if step.kept {
                left -= 1;
            }
        }
        if step.grew {
            left = run.hysteresis;
        }
        if step.n.is_multiple_of(run.window) {
            if bars {
                let _ = writeln!(
                    log,
                    "\n{{'loss': {}, 'learning_rate': {}, 'epoch': 0.05}}",
                    nan(step.loss, 4),
                    if step.overflow && step.n < 20 {
                        "0"
                    } else {
                        "2.5e-06"
                    }
                );
            } else {
                let _ = writeln!(
                    log,
                    "[{}] [INFO] [logging.py:96:log_dist] [Rank 0] step={}, skipped={skipped}, lr=[9.6e-06], mom=[(0.9, 0.95)]",
                    stamp(step.n, 900),
                    step.n
                );
                let _ = writeln!(
                    log,
                    "steps: {} loss: {} iter time (s): 4.226 samples/sec: 7.550",
                    step.n,
                    nan(step.loss, 4)
                );
            }
        }
    }
    if run.stopped {
        let _ = writeln!(
            log,
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
        );
    }
}

fn deepspeed_fused(run: &Run, dice: &mut Dice, log: &mut String) {
    let ranks = dice.within(1, 4);
    let head = "[INFO] [fused_optimizer.py:314:_update_scale]";
    for step in &run.steps {
        if step.overflow {
            for _ in 0..ranks {
                let _ = writeln!(
                    log,
                    "[{}] {head} \nGrad overflow on iteration {}",
                    stamp(step.n, 1),
                    step.n - 1
                );
            }
            for _ in 0..ranks {
                let _ = writeln!(
                    log,
                    "[{}] {head} Reducing dynamic loss scale from {} to {}",
                    stamp(step.n, 2),
                    py(step.before),
                    py(step.after)
                );
            }
            let _ = writeln!(
                log,
                "[{}] [INFO] [logging.py:60:log_dist] [Rank 0] Overflow detected. Skipping step. Attempted loss scale: {}, reducing to {}",
                stamp(step.n, 3),
                py(step.before),
                py(step.after)
            );
        }
        if step.grew {
            for _ in 0..ranks {
                let _ = writeln!(
                    log,
                    "[{}] {head} \nNo Grad overflow for {} iterations",
                    stamp(step.n, 1),
                    run.interval
                );
                let _ = writeln!(
                    log,
                    "[{}] {head} Increasing dynamic loss scale from {} to {}",
                    stamp(step.n, 2),
                    py(step.before),
                    py(step.after)
                );
            }
        }
        if step.n.is_multiple_of(run.window) {
            let _ = writeln!(
                log,
                " iteration {:8}/    5000 | learning rate: 3.1E-06 | global batch size:    32 | lm loss: {} | loss scale: {} | grad norm: 1.034 | number of skipped iterations:   0 | number of nan iterations:   0 |",
                step.n,
                if step.loss.is_nan() {
                    "nan".into()
                } else {
                    format!("{:.6E}", step.loss)
                },
                py(step.after)
            );
        }
    }
}

fn apex(run: &Run, dice: &mut Dice, log: &mut String) {
    let ranks = dice.pick(&[1, 1, 2, 4, 8]);
    let wording = dice.within(0, 2);
    for step in &run.steps {
        if step.overflow {
            let line = match wording {
                0 => format!(
                    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}",
                    py(step.after)
                ),
                1 => format!(
                    "Gradient overflow.  Skipping step, reducing loss scale to {}",
                    py(step.after)
                ),
                _ => format!(
                    "OVERFLOW within closure! Skipping step, loss scaler 0 reducing loss scale to {}",
                    py(step.after)
                ),
            };
            copies(log, dice, ranks, &line);
        }
        plain_progress(log, run, step);
    }
}

fn legacy(run: &Run, dice: &mut Dice, log: &mut String) {
    let pair = dice.within(0, 1) == 0;
    for step in &run.steps {
        if step.overflow {
            if pair {
                let _ = writeln!(
                    log,
                    "\nGrad overflow on iteration {}\nUsing dynamic loss scale of {}",
                    step.n - 1,
                    py(step.before)
                );
            } else {
                let _ = writeln!(
                    log,
                    "OVERFLOW! Skipping step. Attempted loss scale: {}",
                    py(step.before)
                );
            }
        }
        plain_progress(log, run, step);
    }
}

fn fairseq(run: &Run, dice: &mut Dice, log: &mut String) {
    let wording = dice.within(0, 2);
    let mut updates = 0;
    let _ = writeln!(
        log,
        "2021-01-26 03:01:31 | INFO | fairseq.trainer | begin training epoch 1"
    );
    for step in &run.steps {
        let last = step.n as usize == run.steps.len() && run.stopped;
        if step.overflow && !last {
            let _ = match wording {
                0 => writeln!(
                    log,
                    "2021-01-26 03:02:22 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: {}",
                    py(step.after)
                ),
                1 => writeln!(
                    log,
                    "2021-01-26 03:02:22 | INFO | fairseq.trainer | NOTE: overflow detected, setting loss scale to: {}",
                    py(step.after)
                ),
                _ => writeln!(
                    log,
                    "| WARNING: overflow detected, setting loss scale to: {}",
                    py(step.after)
                ),
            };
        } else {
            updates += 1;
        }
        if step.n % run.window == 0 && (!step.overflow || step.loss.is_nan()) {
            let loss = nan(step.loss, 3);
            let _ = match wording {
                0 => writeln!(
                    log,
                    "2021-01-26 03:13:25 | INFO | train_inner | {{\"epoch\": 1, \"update\": 0.01, \"loss\": \"{loss}\", \"num_updates\": \"{updates}\", \"lr\": \"1e-07\", \"gnorm\": \"2.05\", \"loss_scale\": \"{}\", \"wall\": \"714\"}}",
                    rounded(step.after)
                ),
                _ => writeln!(
                    log,
                    "train_inner | epoch 001:  {:4} / 2100 loss={loss}, wps=27.1, ups=0.02, num_updates={updates}, lr=1.5625e-07, gnorm=2.050, loss_scale={}, train_wall=509, wall=714",
                    step.n - 1,
                    rounded(step.after)
                ),
            };
        }
    }
    if run.stopped {
        let _ = writeln!(
            log,
            "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding."
        );
    }
}

/// fairseq rounds to four decimals.
fn rounded(scale: f64) -> String {
    let text = format!("{scale:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn metaseq(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    let _ = writeln!(
        log,
        "*** SCALE_WINDOW: {}, loss scale: {} ***",
        run.interval,
        py(run.steps[0].before)
    );
    let mut updates = 0;
    for step in &run.steps {
        if step.overflow {
            let _ = writeln!(
                log,
                "2022-01-26 03:02:22 | INFO | metaseq.trainer | NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: {}",
                py(step.after)
            );
        } else {
            updates += 1;
        }
        if step.n % run.window == 0 && (!step.overflow || step.loss.is_nan()) {
            let _ = writeln!(
                log,
                "2022-01-26 03:02:22 | INFO | train_inner | {{\"epoch\": 1, \"actv_norm\": \"1\", \"loss\": \"{}\", \"num_updates\": \"{updates}\", \"loss_scale\": \"{}\"}}",
                nan(step.loss, 3),
                rounded(step.after)
            );
        }
    }
}

fn fairseq2(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    let _ = writeln!(
        log,
        "[Rank 0] 03/20/24 10:00:00 INFO fairseq2 - float16 loss scale window set to {}.",
        run.interval
    );
    for step in &run.steps {
        if step.overflow && step.kept {
            let _ = writeln!(
                log,
                "[Rank 0] WARNING fairseq2 - Overflow detected, ignoring gradient, loss scale is already at minimum ({:?}). Your loss is probably exploding.",
                step.after
            );
        } else if step.overflow {
            let _ = writeln!(
                log,
                "[Rank 0] INFO fairseq2 - Overflow detected, ignoring gradient, decreasing loss scale from {:?} to {:?}.",
                step.before, step.after
            );
        }
        if step.grew {
            let _ = writeln!(
                log,
                "[Rank 0] INFO fairseq2 - No gradient overflow detected in the last {} step(s), increasing loss scale from {:?} to {:?}.",
                run.interval, step.before, step.after
            );
        }
        if step.n.is_multiple_of(run.window) {
            let _ = writeln!(
                log,
                "[Rank 0] INFO fairseq2 - Train Metrics (step {}) - Loss: {} | Gradient Norm: 1.5",
                step.n,
                nan(step.loss, 4)
            );
        }
    }
}

fn megatron(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    let (mut skipped, mut last_loss, mut bad) = (0, None, false);
    for step in &run.steps {
        if step.overflow && !step.loss.is_nan() {
            skipped += 1;
        } else if step.overflow {
            skipped += 1;
            bad = true;
        } else {
            last_loss = Some(step.loss);
        }
        if step.n.is_multiple_of(run.window) {
            let loss = match last_loss {
                Some(loss) if !bad => format!("lm loss: {loss:.6E} | "),
                _ => String::new(),
            };
            let norm = if bad {
                "grad norm: nan | "
            } else if last_loss.is_some() {
                "grad norm: 2.1 | "
            } else {
                ""
            };
            let _ = writeln!(
                log,
                " iteration {:8}/    5000 | consumed samples: {:12} | elapsed time per iteration (ms): 356.2 | learning rate: 1.000E-06 | global batch size:     4 | {loss}loss scale: {:.1} | {norm}number of skipped iterations: {skipped:3} | number of nan iterations:   0 |",
                step.n,
                step.n * 4,
                step.after
            );
            (skipped, last_loss, bad) = (0, None, false);
        }
    }
}

fn sat(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    let mut left = run.hysteresis;
    for step in &run.steps {
        if step.overflow {
            let tail = if step.kept && left > 1 {
                left -= 1;
                "but hysteresis is 2. Reducing hysteresis to 1".to_owned()
            } else {
                format!("reducing to {}", step.after)
            };
            let _ = writeln!(
                log,
                "[{}] [INFO] [loss_scaler.py:188:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, {tail}",
                stamp(step.n, 1),
                step.before
            );
        }
        if step.grew {
            left = run.hysteresis;
        }
        if step.n.is_multiple_of(run.window) {
            let loss = if step.loss.is_nan() {
                "NAN".to_owned()
            } else {
                format!("{:.6E}", step.loss)
            };
            let _ = writeln!(
                log,
                "[{}] [INFO] [RANK 0]  iteration {:8}/    5000 | elapsed time per iteration (ms): 4131.2 | learning rate 1.0E-05 | total loss {loss} | loss {loss} | loss scale {:.1} |speed 14.53 samples/(min*GPU)",
                stamp(step.n, 9),
                step.n,
                step.after
            );
        }
    }
    if run.stopped {
        let _ = writeln!(
            log,
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
        );
    }
}

fn swin(run: &Run, dice: &mut Dice, log: &mut String) {
    let epoch = dice.pick(&[0, 1]);
    let (mut sum, mut count) = (0.0, 0.0);
    for step in &run.steps {
        sum += step.after;
        count += 1.0;
        if step.n.is_multiple_of(run.window) {
            let loss = nan(step.loss, 4);
            let _ = writeln!(
                log,
                "[2022-04-25 05:20:19 swin_tiny](main.py 310): INFO Train: [{epoch}/300][{}/5004]\teta 0:17:06 lr 0.000500\t wd 0.0500\ttime 1.1737 (1.0765)\tloss {loss} ({loss})\tgrad_norm 0.9340 (nan)\tloss_scale {:.4} ({:.4})\tmem 4814MB",
                step.n,
                step.after,
                sum / count
            );
        }
    }
}

fn beit(run: &Run, dice: &mut Dice, log: &mut String) {
    let epoch = dice.pick(&[0, 1]);
    let (mut sum, mut count) = (0.0, 0.0);
    let mut recent: Vec<f64> = Vec::new();
    for step in &run.steps {
        sum += step.after;
        count += 1.0;
        recent.push(step.after);
        if recent.len() > 20 {
            recent.remove(0);
        }
        if step.n.is_multiple_of(run.window) {
            let mut sorted = recent.clone();
            sorted.sort_by(f64::total_cmp);
            let loss = nan(step.loss, 4);
            let _ = writeln!(
                log,
                "Epoch: [{epoch}]  [{:4}/1299]  eta: 0:10:49  lr: 0.001435  min_lr: 0.001435  loss: {loss} ({loss})  loss_scale: {:.4} ({:.4})  weight_decay: 0.0500 (0.0500)  grad_norm: 0.3927 (nan)  time: 0.4944  data: 0.0001  max mem: 19152",
                step.n,
                sorted[(sorted.len() - 1) / 2],
                sum / count
            );
        }
    }
}

fn insightface(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    for step in &run.steps {
        if step.n.is_multiple_of(run.window) {
            let _ = writeln!(
                log,
                "Training: 2021-08-18 05:22:42,500-Speed 463.19 samples/sec   Loss {}   LearningRate 0.0781   Epoch: 0   Global Step: {}   Fp16 Grad Scale: {:2.0}   Required: 237 hours",
                nan(step.loss, 4),
                step.n,
                step.after
            );
        }
    }
}

fn four_digits(value: f64) -> String {
    if (1e-3..1000.0).contains(&value) {
        format!("{value:.3}")
    } else {
        let text = format!("{value:.3e}");
        let (digits, power) = text.split_once('e').expect("an exponent");
        let power: i32 = power.parse().expect("whole");
        format!(
            "{digits}e{}{:02}",
            if power < 0 { '-' } else { '+' },
            power.abs()
        )
    }
}

fn espnet(run: &Run, dice: &mut Dice, log: &mut String) {
    let key = dice.pick(&["loss_scale", "grad_scale"]);
    let (mut sum, mut count, mut from) = (0.0, 0.0, 1);
    for step in &run.steps {
        if step.overflow {
            let _ = writeln!(
                log,
                "[node01] 2022-09-29 04:03:53,500 (trainer:647) WARNING: The grad norm is nan. Skipping updating the model."
            );
        }
        sum += step.after;
        count += 1.0;
        if step.n.is_multiple_of(run.window) {
            let loss = if step.loss.is_nan() {
                "nan".to_owned()
            } else {
                format!("{:.3}", step.loss)
            };
            let _ = writeln!(
                log,
                "[node01] 2022-09-29 03:50:11,000 (trainer:706) INFO: 1epoch:train:{from}-{}batch: iter_time=2.428e-04, forward_time=0.142, loss_ctc={loss}, acc=0.496, loss={loss}, backward_time=0.138, grad_norm=63.297, clip=100.000, {key}={}, optim_step_time=0.102",
                step.n,
                four_digits(sum / count)
            );
            (sum, count, from) = (0.0, 0.0, step.n + 1);
        }
    }
}

fn icefall(run: &Run, dice: &mut Dice, log: &mut String) {
    let rank = dice.within(0, 7);
    for step in &run.steps {
        if step.n % 100 == 0 && step.after < 0.01 {
            let _ = writeln!(
                log,
                "2025-05-20 02:35:32,000 WARNING [train.py:1047] ({rank}/8) Grad scale is small: {}",
                py(step.after)
            );
            if step.after < 1e-5 {
                let _ = writeln!(
                    log,
                    "RuntimeError: grad_scale is too small, exiting: {}",
                    py(step.after)
                );
                return;
            }
        }
        if step.n.is_multiple_of(run.window) {
            let loss = nan(step.loss, 4);
            let _ = writeln!(
                log,
                "2025-05-20 02:35:32,000 INFO [train.py:1056] ({rank}/8) Epoch 1, batch {}, loss[loss={loss}, simple_loss=0.6420, over 19153.00 frames. ], tot_loss[loss={loss}, over 37589436.30 frames. ], batch size: 130, lr: 2.73e-02, grad_scale: {}",
                step.n,
                py(step.after)
            );
        }
    }
}

fn guided(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    let mut lg = run.steps[0].before.log2();
    let mut sum = 0.0;
    for step in &run.steps {
        if step.overflow {
            lg -= 1.0;
            let _ = writeln!(log, "Found NaN, decreased lg_loss_scale to {lg}");
        } else {
            lg += 0.001;
        }
        sum += lg;
        if step.n % run.window.max(5) == 0 {
            let mean = sum / run.window.max(5) as f64;
            sum = 0.0;
            let short = |v: f64| {
                if v.is_nan() {
                    "nan".to_owned()
                } else {
                    format!("{v:.3}")
                }
            };
            let _ = writeln!(
                log,
                "-----------------------------\n| lg_loss_scale | {:<9} |\n| loss          | {:<9} |\n| samples       | 3.92e+05  |\n| step          | {:<9} |\n-----------------------------",
                format!("{mean:.1}"),
                short(step.loss),
                step.n
            );
        }
    }
}

fn mindyolo(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    for step in &run.steps {
        if step.overflow {
            let _ = writeln!(
                log,
                "2024-12-25 09:58:34,000 [WARNING] overflow, drop step, loss scale adjust to {}",
                py(step.after)
            );
        }
        if step.n.is_multiple_of(run.window) {
            let _ = writeln!(
                log,
                "2024-12-25 09:58:34,009 [INFO] Epoch 1/200, Step {}/3995, imgsize (640, 640), loss: {}, lbox: 3.6262, lcls: 5.5689, dfl: 2.4756, cur_lr: 0.099",
                step.n,
                nan(step.loss, 4)
            );
        }
    }
}

fn paddle(run: &Run, dice: &mut Dice, log: &mut String) {
    let both = dice.within(0, 1) == 0;
    for step in &run.steps {
        if step.overflow {
            let _ = writeln!(
                log,
                "Found inf or nan, current scale is: {}, decrease to: {}*0.5",
                py(step.before),
                py(step.before)
            );
            if both {
                let _ = writeln!(
                    log,
                    "[{}] [ WARNING] - optimizer not run, scale_before: {}, scale_after: {}",
                    stamp(step.n, 0),
                    py(step.before),
                    py(step.after)
                );
            }
        }
        if step.n.is_multiple_of(run.window) {
            let _ = writeln!(
                log,
                "[{}] [    INFO] - loss: {}, learning_rate: 3e-07, global_step: {}, interval_runtime: 0.3853, interval_steps_per_second: 2.5952, ppl: 11.8, progress_or_epoch: 0.002",
                stamp(step.n, 388),
                nan(step.loss, 8),
                step.n
            );
        }
    }
}

fn paddlenlp(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    let mut good = 0;
    for step in &run.steps {
        good = if step.overflow || step.grew {
            0
        } else {
            good + 1
        };
        if step.n.is_multiple_of(run.window) {
            let _ = writeln!(
                log,
                "[{}] [    INFO] - global step {}, loss: {}, avg_reader_cost: 0.001 sec, speed: 0.5 step/s, learning rate: 1.00000e-05, loss_scaling: {}, incr_count: {good}, decr_count: 0",
                stamp(step.n, 1),
                step.n,
                nan(step.loss, 9),
                py(step.after)
            );
        }
    }
}

fn minillm(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    let mut left = run.hysteresis;
    for step in &run.steps {
        if step.overflow {
            let tail = if step.kept && left > 1 {
                left -= 1;
                "but hysteresis is 2. Reducing hysteresis to 1".to_owned()
            } else {
                format!("reducing to {}", step.after)
            };
            let _ = writeln!(
                log,
                "[{}] [INFO] [loss_scaler.py:188:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, {tail}",
                stamp(step.n, 1),
                step.before
            );
        }
        if step.grew {
            left = run.hysteresis;
        }
        if step.n.is_multiple_of(run.window) {
            let _ = writeln!(
                log,
                "train | epoch   0 | Iter: {:6}/ 12000 | global iter: {:6}/ 12000| tot_loss: {} | rl_loss: 0.12 | lr: 5.0000e-06 | scale: {:10.4} | time: 4.4 | step time: 4.4",
                step.n,
                step.n,
                nan(step.loss, 4),
                step.after
            );
        }
    }
    if run.stopped {
        let _ = writeln!(
            log,
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
        );
    }
}

fn audiocraft(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    let (mut sum, mut count) = (0.0, 0.0);
    for step in &run.steps {
        sum += step.after;
        count += 1.0;
        if step.n.is_multiple_of(run.window) {
            let loss = if step.loss.is_nan() {
                "NAN".to_owned()
            } else {
                format!("{:.3}", step.loss)
            };
            let _ = writeln!(
                log,
                "[\x1b[36m03-20 10:00:00\x1b[0m][\x1b[34mflashy.solver\x1b[0m][\x1b[32mINFO\x1b[0m] - Train | Epoch 1 | {}/2000 | 1.50 it/sec | lr 1.00E-04 | grad_norm INF | \x1b[1mce {loss}\x1b[0m | ppl 164.0 | grad_scale {:.3}",
                step.n,
                sum / count
            );
            (sum, count) = (0.0, 0.0);
        }
    }
}

fn colossalai(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    for step in &run.steps {
        if step.overflow {
            let _ = writeln!(
                log,
                "[03/20/24 10:00:00] INFO     colossalai - colossalai - INFO: /opt/conda/lib/python3.9/site-packages/colossalai/zero/low_level_optim.py:588 step\n                    INFO     colossalai - colossalai - INFO: Found overflow. Skip step"
            );
        }
        plain_progress(log, run, step);
    }
}

fn dll(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    for step in &run.steps {
        if step.n == 1 {
            let _ = writeln!(
                log,
                "DLL 2020-03-26 06:32:24.441546 - PARAMETER loss_scale : {}",
                py(step.before)
            );
        }
        if step.after != step.before {
            let _ = writeln!(
                log,
                "DLL 2020-03-26 06:32:24.441546 - PARAMETER loss_scale : {}",
                py(step.after)
            );
        }
        if step.n.is_multiple_of(run.window) {
            let loss = nan(step.loss, 6);
            let _ = writeln!(
                log,
                "DLL 2020-03-26 06:32:24.441546 - Training Epoch: 0 Training Iteration: {}  average_loss : {loss}  step_loss : {loss}  learning_rate : 1.2e-05",
                step.n
            );
        }
    }
}

fn mmcv(run: &Run, dice: &mut Dice, log: &mut String) {
    let ranks = dice.pick(&[1, 1, 4]);
    for step in &run.steps {
        if step.overflow {
            let line = format!(
                "2021-05-05 10:00:00,000 - mmdet - WARNING - Check overflow, downscale loss scale to {}",
                py(step.after)
            );
            copies(log, dice, ranks, &line);
        }
        if step.n.is_multiple_of(run.window) {
            let _ = writeln!(
                log,
                "2021-05-05 10:00:00,000 - mmdet - INFO - Epoch [1][{}/7330]\tlr: 1.0e-03, eta: 1 day, 2:00:00, time: 0.5, data_time: 0.05, memory: 4000, loss_rpn_cls: 0.5, acc: 90.1, loss: {}, grad_norm: nan",
                step.n,
                nan(step.loss, 4)
            );
        }
    }
}

fn torch_print(run: &Run, dice: &mut Dice, log: &mut String) {
    let style = dice.within(0, 5);
    for step in &run.steps {
        let (scale, loss) = (step.after, nan(step.loss, 4));
        if style == 0 {
            // A tensor as torch prints it: five digits from 1e8 on.
            let text = if !(1e-4..1e8).contains(&scale) {
                four_digits(scale)
            } else {
                if scale < 1.0 {
                    format!("{scale:.4}")
                } else {
                    format!("{scale}.")
                }
            };
            let _ = writeln!(log, "tensor([{text}], device='cuda:0')");
            let _ = writeln!(log, "loss {loss}");
            continue;
        }
        if step.n % run.window != 0 {
            continue;
        }
        let _ = match style {
            1 => writeln!(log, "step {} loss {loss} scale {}", step.n, py(scale)),
            2 => writeln!(
                log,
                "{{'step': {}, 'loss': {loss}, 'loss_scale': {}}}",
                step.n,
                py(scale)
            ),
            3 => writeln!(
                log,
                "step {} loss {loss}\n当前缩放因子: {}",
                step.n,
                py(step.before)
            ),
            4 => writeln!(
                log,
                "[{}] loss: {loss}\n{{'scale': {}, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 3}}",
                step.n,
                py(scale)
            ),
            _ => writeln!(
                log,
                "Epoch 1 | iter {} | Loss: {loss} | grad_scale: {}",
                step.n,
                py(scale)
            ),
        };
    }
}

fn gradscale(run: &Run, dice: &mut Dice, log: &mut String) {
    let _ = dice;
    for step in &run.steps {
        if step.overflow {
            let _ = writeln!(
                log,
                "gradscale: step {} overflow, loss_scale {} -> {}, first non-finite tensor layer.{}.weight",
                step.n - 1,
                py(step.before),
                py(step.after),
                step.n % 7
            );
        }
        plain_progress(log, run, step);
    }
}

const fn writer(
    name: &'static str,
    init: (u64, u64),
    write: fn(&Run, &mut Dice, &mut String),
) -> Writer {
    Writer {
        name,
        init,
        hysteresis: false,
        floor: None,
        least: -4.0,
        intervals: &[20, 50, 64, 100, 128, 250, 1000, 2000],
        write,
    }
}

/// One a dialect.
pub const WRITERS: [Writer; 25] = [
    Writer {
        hysteresis: true,
        floor: Some((1.0, true)),
        ..writer("deepspeed", (12, 32), deepspeed)
    },
    Writer {
        floor: Some((1.0, false)),
        ..writer("deepspeed-fused", (12, 32), deepspeed_fused)
    },
    writer("apex", (12, 24), apex),
    writer("fp16-optimizer-legacy", (12, 32), legacy),
    Writer {
        floor: Some((1.0 / 8192.0, true)),
        ..writer("fairseq", (4, 7), fairseq)
    },
    Writer {
        floor: Some((0.03125, false)),
        ..writer("metaseq", (2, 7), metaseq)
    },
    Writer {
        floor: Some((1.0 / 8192.0, false)),
        ..writer("fairseq2", (4, 16), fairseq2)
    },
    Writer {
        hysteresis: true,
        floor: Some((1.0, false)),
        ..writer("megatron", (12, 32), megatron)
    },
    Writer {
        hysteresis: true,
        floor: Some((1.0, true)),
        ..writer("sat", (12, 32), sat)
    },
    Writer {
        least: 1.0,
        ..writer("swin-meter", (12, 16), swin)
    },
    Writer {
        least: 1.0,
        ..writer("beit-meter", (12, 16), beit)
    },
    Writer {
        least: 1.0,
        ..writer("insightface", (12, 16), insightface)
    },
    Writer {
        least: 1.0,
        ..writer("espnet", (12, 16), espnet)
    },
    Writer {
        least: 1.0,
        ..writer("icefall", (12, 16), icefall)
    },
    Writer {
        intervals: &[1000],
        ..writer("guided-diffusion", (16, 20), guided)
    },
    writer("mindyolo", (10, 16), mindyolo),
    writer("paddle", (12, 16), paddle),
    Writer {
        least: 1.0,
        ..writer("paddlenlp-pretrain", (12, 16), paddlenlp)
    },
    Writer {
        hysteresis: true,
        floor: Some((1.0, true)),
        ..writer("minillm", (12, 32), minillm)
    },
    Writer {
        least: 1.0,
        ..writer("audiocraft", (12, 16), audiocraft)
    },
    writer("colossalai", (12, 16), colossalai),
    Writer {
        least: 1.0,
        ..writer("dll", (12, 20), dll)
    },
    writer("mmcv", (9, 16), mmcv),
    Writer {
        least: 8.0,
        ..writer("torch-print", (12, 30), torch_print)
    },
    writer("gradscale", (12, 16), gradscale),
];

//! The talk on stderr: progress bars on a terminal, for work of more than a second.

use crate::input::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A bar that appears once its work has taken a second; nothing where stderr is no terminal.
pub struct Bar {
    shown: bool,
    now: Mutex<Option<Work>>,
}

/// A piece of work under way.
struct Work {
    what: String,
    total: u64,
    done: u64,
    since: Instant,
    bar: Option<ProgressBar>,
}

impl Bar {
    /// A bar, or silence where it is asked for.
    pub fn new(quiet: bool) -> Bar {
        Bar {
            shown: !quiet && std::io::stderr().is_terminal(),
            now: Mutex::new(None),
        }
    }
}

impl Progress for Bar {
    fn begin(&self, what: &str, total: u64) {
        if let (true, Ok(mut now)) = (self.shown, self.now.lock()) {
            *now = Some(Work {
                what: what.to_owned(),
                total,
                done: 0,
                since: Instant::now(),
                bar: None,
            });
        }
    }

    fn advance(&self, parts: u64) {
        let Ok(mut now) = self.now.lock() else { return };
        let Some(work) = now.as_mut() else { return };
        work.done += parts;
        if work.bar.is_none() && work.since.elapsed() > Duration::from_secs(1) {
            let bar = ProgressBar::with_draw_target(Some(work.total), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_message(work.what.clone());
            work.bar = Some(bar);
        }
        if let Some(bar) = &work.bar {
            bar.set_position(work.done);
        }
    }

    fn end(&self) {
        if let Ok(mut now) = self.now.lock()
            && let Some(Work { bar: Some(bar), .. }) = now.take()
        {
            bar.finish_and_clear();
        }
    }
}

//! The talk on stderr: progress bars on a terminal, for work of more than a second.

use crate::input::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A bar that appears once its work has taken a second; nothing where stderr is no terminal.
pub struct Bar {
    shown: bool,
    now: Mutex<Option<(String, u64, u64, Instant, Option<ProgressBar>)>>,
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
            *now = Some((what.to_owned(), total, 0, Instant::now(), None));
        }
    }

    fn advance(&self, parts: u64) {
        let Ok(mut now) = self.now.lock() else { return };
        let Some((what, total, done, since, bar)) = now.as_mut() else {
            return;
        };
        *done += parts;
        if bar.is_none() && since.elapsed() > Duration::from_secs(1) {
            let new = ProgressBar::with_draw_target(Some(*total), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}");
            new.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            new.set_message(what.clone());
            *bar = Some(new);
        }
        if let Some(bar) = bar {
            bar.set_position(*done);
        }
    }

    fn end(&self) {
        if let Ok(mut now) = self.now.lock()
            && let Some((.., Some(bar))) = now.take()
        {
            bar.finish_and_clear();
        }
    }
}

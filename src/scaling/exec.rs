//! Any program as a subject of the laws: JSON Lines over its standard input and output.
//!
//! ```text
//! {"op":"reset","config":{...}}       -> {"scale":65536}            (and "config":null from a program that takes none)
//! {"op":"step","found_inf":true}      -> {"scale":32768,"skipped":true}
//! {"op":"save"}                       -> {"state":...}
//! {"op":"load","state":...}           -> {"scale":...}
//! any                                 -> {"error":"..."}            a terminal state
//! ```
//!
//! One answer a request. A program that dies, answers anything else or says nothing for [`SILENCE`] (twice that before
//! its first answer) is a
//! [`Failure`] at once. It is trusted with nothing: a line has a longest length, output that nobody asked for waits in the
//! pipe, and its whole process group ends when the [`Program`] is dropped.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, Value as Json, json};

use super::laws::{Failure, Step, Subject};
use super::policy::as_number;

/// How long a program may say nothing.
pub const SILENCE: Duration = Duration::from_secs(3);
/// The longest answer that is read: states of real scalers are under a kilobyte.
const LINE_BYTES: u64 = 4 << 20;
/// How much of the program's standard error is kept, from its end.
const STDERR_BYTES: usize = 2000;

/// A running program.
#[derive(Debug)]
pub struct Program {
    command: String,
    config: Option<Map<String, Json>>,
    silence: Duration,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Line>,
    complaints: Arc<Mutex<VecDeque<u8>>>,
    /// Flags of the run since the last reset, for the report.
    found_inf: Vec<bool>,
    had_answered: bool,
    took_config: bool,
}

/// What the reading thread hands over.
#[derive(Debug)]
enum Line {
    Text(Vec<u8>),
    TooLong,
    Unreadable(std::io::Error),
}

impl Program {
    /// Starts `command` through the shell. `config` is sent with every reset.
    ///
    /// # Errors
    /// When the shell cannot be started.
    pub fn start(
        command: &str,
        config: Option<Map<String, Json>>,
        silence: Duration,
    ) -> Result<Program, Failure> {
        let mut shell = if cfg!(windows) {
            Command::new("cmd")
        } else {
            Command::new("sh")
        };
        shell
            .arg(if cfg!(windows) { "/C" } else { "-c" })
            .arg(command);
        shell
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        #[cfg(unix)]
        {
            // A group of its own, so that what the shell started ends with it.
            use std::os::unix::process::CommandExt;
            shell.process_group(0);
        }
        let failure = |found: String| Failure {
            doing: format!("starting \"{command}\""),
            found,
            expected: "a program".to_owned(),
            found_inf: Vec::new(),
            had_answered: false,
            refused: false,
        };
        let mut child = shell.spawn().map_err(|e| failure(e.to_string()))?;
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(failure("no pipes".to_owned()));
        };
        // One answer a request: a program that says more waits, and so does its flood.
        let (sender, lines) = sync_channel(1);
        let complaints = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&complaints);
        thread::spawn(move || read_lines(BufReader::new(stdout), &sender));
        thread::spawn(move || keep_end(stderr, &kept));
        Ok(Program {
            command: command.to_owned(),
            config,
            silence,
            stdin: child.stdin.take(),
            child,
            lines,
            complaints,
            found_inf: Vec::new(),
            had_answered: false,
            took_config: false,
        })
    }

    /// Whether the program took the configuration sent with the last reset, rather than answering `"config":null`.
    pub fn took_config(&self) -> bool {
        self.took_config
    }

    /// Sends a request and reads the one answer to it.
    fn ask(&mut self, request: &Json) -> Result<Map<String, Json>, Failure> {
        let text = format!("{request}\n");
        // A program that ends without reading is told by what it said, below.
        let sent = self.stdin.as_mut().map(|stdin| {
            stdin
                .write_all(text.as_bytes())
                .and_then(|()| stdin.flush())
        });
        // The first answer may take longer: an interpreter loads its libraries before it.
        let patience = if self.had_answered {
            self.silence
        } else {
            self.silence * 2
        };
        let wait = if matches!(sent, Some(Ok(()))) {
            patience
        } else {
            self.silence.min(Duration::from_millis(500))
        };
        let line = match self.lines.recv_timeout(wait) {
            Ok(Line::Text(line)) => line,
            Ok(Line::TooLong) => {
                return Err(
                    self.failure(request, format!("a line of more than {LINE_BYTES} bytes"))
                );
            }
            Ok(Line::Unreadable(e)) => {
                return Err(self.failure(request, format!("an unreadable answer: {e}")));
            }
            Err(RecvTimeoutError::Timeout) if matches!(sent, Some(Ok(()))) => {
                let seconds = patience.as_secs_f64();
                return Err(self.failure(request, format!("silence for {seconds} s")));
            }
            Err(_) => {
                let end = self.exit_status();
                return Err(self.failure(request, end));
            }
        };
        let text = String::from_utf8_lossy(&line);
        let answer =
            serde_json::from_str(&text).or_else(|_| serde_json::from_str(&quote_infinities(&text)));
        match answer {
            Ok(Json::Object(answer)) => {
                self.had_answered = true;
                Ok(answer)
            }
            _ => Err(self.failure(request, format!("the line {:?}", excerpt(&text)))),
        }
    }

    fn exit_status(&mut self) -> String {
        // Its output has ended; it gets a moment to end itself.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(500) {
            if let Ok(Some(status)) = self.child.try_wait() {
                return ended(status);
            }
            thread::sleep(Duration::from_millis(10));
        }
        "the end of its output".to_owned()
    }

    fn failure(&self, request: &Json, found: String) -> Failure {
        let op = request
            .get("op")
            .and_then(Json::as_str)
            .unwrap_or("request");
        let expected = match op {
            "step" => "{\"scale\":number,\"skipped\":true|false}",
            "save" => "{\"state\":...}",
            "reset" => "{\"scale\":number}, and \"config\":null where it takes none",
            _ => "{\"scale\":number}",
        };
        // The reading thread may be a moment behind.
        thread::sleep(Duration::from_millis(30));
        let complaints = self
            .complaints
            .lock()
            .map(|c| c.iter().copied().collect::<Vec<u8>>())
            .unwrap_or_default();
        let complaints = String::from_utf8_lossy(&complaints);
        let last = complaints
            .trim_end()
            .rsplit('\n')
            .next()
            .unwrap_or_default();
        let found = if last.is_empty() {
            found
        } else {
            format!("{found}; its last words on stderr: {:?}", excerpt(last))
        };
        Failure {
            doing: format!("asking \"{}\" to {op}", excerpt(&self.command)),
            found,
            expected: expected.to_owned(),
            found_inf: self.found_inf.clone(),
            had_answered: self.had_answered,
            refused: false,
        }
    }

    fn scale(&self, request: &Json, answer: &Map<String, Json>) -> Result<f64, Failure> {
        answer
            .get("scale")
            .and_then(as_number)
            .ok_or_else(|| self.nonsense(request, answer))
    }

    /// An answer without what was asked for: the program's error, or anything else.
    fn nonsense(&self, request: &Json, answer: &Map<String, Json>) -> Failure {
        let refused = answer.contains_key("error");
        Failure {
            refused,
            ..self.failure(request, excerpt(&Json::Object(answer.clone()).to_string()))
        }
    }
}

impl Subject for Program {
    fn reset(&mut self) -> Result<f64, Failure> {
        self.found_inf.clear();
        let request = match &self.config {
            Some(config) => json!({"op": "reset", "config": config}),
            None => json!({"op": "reset", "config": {}}),
        };
        let answer = self.ask(&request)?;
        self.took_config = !matches!(answer.get("config"), Some(Json::Null));
        self.scale(&request, &answer)
    }

    fn step(&mut self, found_inf: bool) -> Result<Step, Failure> {
        self.found_inf.push(found_inf);
        let request = json!({"op": "step", "found_inf": found_inf});
        let answer = self.ask(&request)?;
        if let Some(error) = answer.get("error") {
            let words = error
                .as_str()
                .map_or_else(|| error.to_string(), str::to_owned);
            return Ok(Step::Terminal(excerpt(&words)));
        }
        match (
            answer.get("scale").and_then(as_number),
            answer.get("skipped").and_then(Json::as_bool),
        ) {
            (Some(scale), Some(skipped)) => Ok(Step::Done { scale, skipped }),
            _ => Err(self.nonsense(&request, &answer)),
        }
    }

    fn save(&mut self) -> Result<Json, Failure> {
        let request = json!({"op": "save"});
        let answer = self.ask(&request)?;
        answer
            .get("state")
            .cloned()
            .ok_or_else(|| self.nonsense(&request, &answer))
    }

    fn load(&mut self, state: &Json) -> Result<f64, Failure> {
        let request = json!({"op": "load", "state": state});
        let answer = self.ask(&request)?;
        self.scale(&request, &answer)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Most programs end with their input.
        drop(self.stdin.take());
        #[cfg(unix)]
        {
            let group = format!("kill -KILL -- -{}", self.child.id());
            let _ = Command::new("sh")
                .arg("-c")
                .arg(group)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ended(status: ExitStatus) -> String {
    match status.code() {
        Some(code) => format!("that it ended with exit status {code}"),
        None => format!("that it ended ({status})"),
    }
}

/// Hands over one line at a time, until the output ends or nobody listens.
fn read_lines(mut output: impl BufRead, sender: &SyncSender<Line>) {
    loop {
        let mut line = Vec::new();
        let read = (&mut output).take(LINE_BYTES).read_until(b'\n', &mut line);
        let (message, go_on) = match read {
            Ok(0) => return,
            Ok(n) if n as u64 == LINE_BYTES => (Line::TooLong, false),
            Ok(_) if line.trim_ascii().is_empty() => continue,
            Ok(_) => (Line::Text(line), true),
            Err(e) => (Line::Unreadable(e), false),
        };
        if sender.send(message).is_err() || !go_on {
            return;
        }
    }
}

/// Keeps the last bytes of the standard error, and drains the rest so that the program never waits for it.
fn keep_end(mut stderr: impl Read, kept: &Mutex<VecDeque<u8>>) {
    let mut buffer = [0_u8; 4096];
    while let Ok(n @ 1..) = stderr.read(&mut buffer) {
        let Ok(mut kept) = kept.lock() else { return };
        kept.extend(&buffer[..n]);
        let excess = kept.len().saturating_sub(STDERR_BYTES);
        kept.drain(..excess);
    }
}

/// Python's `json` writes `Infinity` and `NaN` bare; they become text, which a scale may be.
fn quote_infinities(text: &str) -> String {
    text.replace("-Infinity", "\"-inf\"")
        .replace("Infinity", "\"inf\"")
        .replace("NaN", "\"nan\"")
}

fn excerpt(text: &str) -> String {
    let text = text.trim_end();
    let mut cut: String = text.chars().take(200).collect();
    if cut.len() < text.len() {
        cut.push_str("...");
    }
    cut
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn first_failure(command: &str) -> (Failure, Duration) {
        let start = Instant::now();
        let mut program =
            Program::start(command, None, Duration::from_millis(700)).expect("sh starts");
        let failure = loop {
            if let Err(failure) = program.reset() {
                break failure;
            }
            if let Err(failure) = program.step(true) {
                break failure;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "never fails");
        };
        drop(program);
        (failure, start.elapsed())
    }

    #[test]
    fn bad_programs_end_in_time_and_are_told_what_they_did() {
        let answer = r#"echo '{"scale":1}'"#;
        for (command, words) in [
            ("exit 3", "exit status 3"),
            ("echo oh no >&2; exit 3", "oh no"),
            ("no-such-program-anywhere", "exit status 127"),
            ("sleep 60", "silence for 1.4 s"),
            ("sleep 60 & sleep 60", "silence"),
            ("echo hello", "hello"),
            ("yes", "the line \"y\""),
            ("yes '{\"scale\":1}'", "{\"scale\":1}"),
            ("cat /dev/zero", "more than"),
            ("echo '[1]'", "[1]"),
            ("echo '{\"scale\":\"big\"}'", "big"),
            (&format!("{answer}; {answer}"), "found"),
            (&format!("read x; {answer}; kill -9 $$"), "signal"),
        ] {
            let (failure, took) = first_failure(command);
            assert!(format!("{failure}").contains(words), "{command}: {failure}");
            assert!(took < Duration::from_secs(8), "{command} took {took:?}");
        }
    }

    #[test]
    fn bare_infinities_of_python_are_understood() {
        let mut program = Program::start(
            r#"read x; echo '{"scale": Infinity}'; cat >/dev/null"#,
            None,
            SILENCE,
        )
        .expect("starts");
        assert_eq!(program.reset().expect("answers"), f64::INFINITY);
    }
}

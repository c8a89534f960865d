//! Step and rank, read off a path.
//!
//! The usual names, looked for in the file's own name first and then in its directories, nearest first:
//!
//! | what | read as |
//! |---|---|
//! | `step_000100`, `step-100`, `step100`, `global_step100`, `iter_100`, `iteration 100`, `update_100` | step 100 |
//! | `grads-100.npz`, `gradients_100`, `checkpoint-100`, `ckpt_100`, `dump_100` | step 100 |
//! | a name of digits alone, `000100.pt` or a directory `000100/` | step 100 |
//! | `rank1`, `rank_1`, `rank-1` | rank 1 |
//! | `model-00001-of-00006` at the end of the name | shard 1 of 6, no step |
//!
//! An `.npy` holds one tensor, and its name is the tensor's: there, `3.npy`, `grad_3.npy` and `gradient_3.npy` are
//! taken for tensors that were numbered, not for steps.

use super::GradientsError;

/// Where in a path the step and the rank stand, for names other than the usual ones (`--step-pattern`).
///
/// Text stands for itself, `{step}` and `{rank}` for digits, `{tensor}` for any text (it then names the tensor of an
/// `.npy`, or a lone one in a `.pt`), `*` for any text. The pattern must fit the whole path below the given directory, or the file's name alone
/// where the pattern has no `/`; the extension may be left out. Only `{tensor}` and a `*` that stands beside another
/// `*` cross a `/`.
///
/// # Examples
///
/// ```
/// use gradscale::gradients::StepPattern;
/// let pattern = StepPattern::parse("it{step}/worker{rank}_*")?;
/// assert_eq!(pattern.find("it20/worker3_grads.npz"), Some((Some(20), Some(3))));
/// assert_eq!(pattern.find("it20/grads.npz"), None);
/// # Ok::<(), gradscale::gradients::GradientsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPattern {
    text: String,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Step,
    Rank,
    Tensor,
    Any,
    AnyDeep,
}

/// What a path says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PathFacts {
    pub step: Option<u64>,
    pub rank: Option<u32>,
    pub tensor: Option<String>,
}

/// More wildcards than this would make matching slow, and no path needs them.
const MAX_WILDCARDS: usize = 8;

impl StepPattern {
    /// Reads a pattern.
    ///
    /// # Errors
    ///
    /// A brace without its partner, an unknown or repeated placeholder, more than eight wildcards, or neither
    /// `{step}` nor `{rank}`.
    pub fn parse(text: &str) -> Result<StepPattern, GradientsError> {
        let bad = |found: String| GradientsError::StepPattern {
            pattern: text.to_string(),
            found,
        };
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let piece = match first {
                '{' => {
                    let end = rest
                        .find('}')
                        .ok_or_else(|| bad("{ without }".to_string()))?;
                    let name = &rest[1..end];
                    rest = &rest[end + 1..];
                    let piece = match name {
                        "step" => Piece::Step,
                        "rank" => Piece::Rank,
                        "tensor" => Piece::Tensor,
                        other => return Err(bad(format!("the unknown placeholder {{{other}}}"))),
                    };
                    if pieces.contains(&piece) {
                        return Err(bad(format!("{{{name}}} twice")));
                    }
                    piece
                }
                '}' => return Err(bad("} without {".to_string())),
                '*' => {
                    let stars = rest.len() - rest.trim_start_matches('*').len();
                    rest = &rest[stars..];
                    if stars > 1 {
                        Piece::AnyDeep
                    } else {
                        Piece::Any
                    }
                }
                _ => {
                    let end = rest.find(['{', '}', '*']).unwrap_or(rest.len());
                    let piece = Piece::Text(rest[..end].to_string());
                    rest = &rest[end..];
                    piece
                }
            };
            pieces.push(piece);
        }
        if !pieces.contains(&Piece::Step) && !pieces.contains(&Piece::Rank) {
            return Err(bad("neither {step} nor {rank}".to_string()));
        }
        let wildcards = pieces
            .iter()
            .filter(|p| matches!(p, Piece::Any | Piece::AnyDeep | Piece::Tensor))
            .count();
        if wildcards > MAX_WILDCARDS {
            return Err(bad(format!("{wildcards} wildcards")));
        }
        Ok(StepPattern {
            text: text.to_string(),
            pieces,
        })
    }

    /// The pattern as it was given.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Step and rank of a path (with `/` between its parts), `None` where the pattern does not fit.
    pub fn find(&self, path: &str) -> Option<(Option<u64>, Option<u32>)> {
        self.facts(path).map(|facts| (facts.step, facts.rank))
    }

    pub(crate) fn facts(&self, path: &str) -> Option<PathFacts> {
        let whole = if self.text.contains('/') {
            path
        } else {
            path.rsplit('/').next().unwrap_or(path)
        };
        let without_extension = match whole.rfind('.') {
            Some(dot) if !whole[dot..].contains('/') => &whole[..dot],
            _ => whole,
        };
        [whole, without_extension].into_iter().find_map(|path| {
            let mut facts = PathFacts::default();
            let places = (self.pieces.len() + 1) * (path.len() + 1);
            let mut fitting = Fitting {
                pieces: &self.pieces,
                text: path,
                failed: vec![false; places],
            };
            fitting.fits(0, 0, &mut facts).then_some(facts)
        })
    }
}

/// One pattern against one text. Which pieces have failed at which place is remembered, so that several stars cost
/// pieces · text² steps and not text^stars.
struct Fitting<'a> {
    pieces: &'a [Piece],
    text: &'a str,
    failed: Vec<bool>,
}

impl<'a> Fitting<'a> {
    /// Whether the pieces from `piece` on fit all of the text from `at` on. Depth is bounded by the number of pieces.
    fn fits(&mut self, piece: usize, at: usize, facts: &mut PathFacts) -> bool {
        let place = piece * (self.text.len() + 1) + at;
        if self.failed[place] {
            return false;
        }
        // What fits from here on does not depend on how this place was reached.
        let fits = self.fits_here(piece, at, facts);
        self.failed[place] = !fits;
        fits
    }

    fn fits_here(&mut self, piece: usize, at: usize, facts: &mut PathFacts) -> bool {
        let (pieces, whole): (&'a [Piece], &'a str) = (self.pieces, self.text);
        let text = &whole[at..];
        let Some(first) = pieces.get(piece) else {
            return text.is_empty();
        };
        match first {
            Piece::Text(literal) => {
                text.starts_with(literal.as_str())
                    && self.fits(piece + 1, at + literal.len(), facts)
            }
            Piece::Step | Piece::Rank => {
                // All digits that stand there: a number does not end in its own middle.
                let digits = leading_digits(text);
                let Ok(number) = text[..digits].parse::<u64>() else {
                    return false;
                };
                if *first == Piece::Step {
                    facts.step = Some(number);
                } else if let Ok(rank) = u32::try_from(number) {
                    facts.rank = Some(rank);
                } else {
                    return false;
                }
                self.fits(piece + 1, at + digits, facts)
            }
            Piece::Tensor | Piece::Any | Piece::AnyDeep => {
                // A single star stays within one part of the path.
                let most = match first {
                    Piece::Any => text.find('/').unwrap_or(text.len()),
                    _ => text.len(),
                };
                let least = usize::from(*first == Piece::Tensor);
                for end in (least..=most).filter(|&end| text.is_char_boundary(end)) {
                    if self.fits(piece + 1, at + end, facts) {
                        if *first == Piece::Tensor {
                            facts.tensor = Some(text[..end].to_string());
                        }
                        return true;
                    }
                }
                false
            }
        }
    }
}

fn leading_digits(text: &str) -> usize {
    text.bytes().take_while(u8::is_ascii_digit).count()
}

const STEP_WORDS: [&str; 6] = ["step", "steps", "iter", "iteration", "iterations", "update"];
const DUMP_WORDS: [&str; 6] = ["grads", "gradients", "checkpoint", "ckpt", "dump", "dumps"];
/// These number the tensors of a list as often as steps.
const SINGULAR_WORDS: [&str; 2] = ["grad", "gradient"];

/// Step and rank by the usual names. `path`: below the given directory, parts separated by `/`; `root`: the name of
/// that directory itself, where only the plain words for a step count (`run-100` is no step).
pub(crate) fn usual(path: &str, root: Option<&str>) -> PathFacts {
    let mut facts = PathFacts::default();
    let mut parts = path.rsplit('/');
    let file = parts.next().unwrap_or(path);
    let (stem, is_npy) = match file.rsplit_once('.') {
        Some((stem, extension)) => (stem, extension.eq_ignore_ascii_case("npy")),
        None => (file, false),
    };
    let stem = shard(stem).map_or(stem, |(stem, _, _)| stem);
    facts.step = number_after(stem, &STEP_WORDS)
        .or_else(|| number_after(stem, &DUMP_WORDS))
        .or_else(|| {
            if is_npy {
                None
            } else {
                number_after(stem, &SINGULAR_WORDS).or_else(|| all_digits(stem))
            }
        });
    facts.rank = rank_in(stem);
    for part in parts {
        facts.step = facts
            .step
            .or_else(|| number_after(part, &STEP_WORDS))
            .or_else(|| number_after(part, &DUMP_WORDS))
            .or_else(|| number_after(part, &SINGULAR_WORDS))
            .or_else(|| all_digits(part));
        facts.rank = facts.rank.or_else(|| rank_in(part));
    }
    if let Some(root) = root {
        facts.step = facts.step.or_else(|| number_after(root, &STEP_WORDS));
        facts.rank = facts.rank.or_else(|| rank_in(root));
    }
    facts
}

fn rank_in(part: &str) -> Option<u32> {
    number_after(part, &["rank"]).and_then(|rank| u32::try_from(rank).ok())
}

fn all_digits(part: &str) -> Option<u64> {
    if part.is_empty() || leading_digits(part) < part.len() {
        None
    } else {
        part.parse().ok()
    }
}

/// The number behind the last of `words` in `part` that stands at the beginning of a word: `step_100`, `step-100`,
/// `step100`, `global_step.100`. No letter or digit may follow it.
fn number_after(part: &str, words: &[&str]) -> Option<u64> {
    find_after(part, words).map(|(_, number)| number)
}

/// The same, and the bytes of word, separator and digits.
fn find_after(part: &str, words: &[&str]) -> Option<(std::ops::Range<usize>, u64)> {
    let lower = part.to_ascii_lowercase();
    let mut found: Option<(std::ops::Range<usize>, u64)> = None;
    for word in words {
        for (at, _) in lower.match_indices(word) {
            if lower[..at].ends_with(|c: char| c.is_ascii_alphanumeric()) {
                continue;
            }
            let behind = &lower[at + word.len()..];
            let behind = behind
                .strip_prefix(['_', '-', '.', '=', ' '])
                .unwrap_or(behind);
            let digits = leading_digits(behind);
            if digits == 0 || behind[digits..].starts_with(|c: char| c.is_alphanumeric()) {
                continue;
            }
            // Twenty digits and more are no step.
            if let Ok(number) = behind[..digits].parse::<u64>()
                && found.as_ref().is_none_or(|(before, _)| before.start < at)
            {
                found = Some((at..lower.len() - behind.len() + digits, number));
            }
        }
    }
    found
}

/// A stem without its step: `fc1_wgrad_iter_000100` → `fc1_wgrad`. As it is where nothing would be left.
pub(crate) fn without_step(stem: &str) -> String {
    let Some((range, _)) = find_after(stem, &STEP_WORDS) else {
        return stem.to_string();
    };
    let front = stem[..range.start].trim_end_matches(['_', '-', '.', ' ']);
    let name = format!("{front}{}", &stem[range.end..]);
    if name.is_empty() {
        stem.to_string()
    } else {
        name
    }
}

/// `model-00001-of-00006` → (`model`, 1, 6).
pub(crate) fn shard(stem: &str) -> Option<(&str, u32, u32)> {
    let (front, count) = stem.rsplit_once("-of-")?;
    let (name, index) = front.rsplit_once(['-', '_', '.']).unwrap_or(("", front));
    let number = |digits: &str| all_digits(digits).and_then(|n| u32::try_from(n).ok());
    let (index, count) = (number(index)?, number(count)?);
    (index <= count && count > 0).then_some((name, index, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &str) -> (Option<u64>, Option<u32>) {
        let facts = usual(path, None);
        (facts.step, facts.rank)
    }

    /// Found by fuzzing: eight wildcards on a path of a hundred bytes took seconds.
    #[test]
    fn many_stars_took_seconds_on_a_path_of_a_hundred_bytes() {
        let pattern = StepPattern::parse("a*a**a*a**a*a**a*a{step}").unwrap();
        let path = "a".repeat(4000) + "b";
        assert_eq!(pattern.find(&path), None);
        assert_eq!(pattern.find("aaaaaaaaaaaa7"), Some((Some(7), None)));
    }

    #[test]
    fn the_usual_names_give_step_and_rank() {
        assert_eq!(of("step_000100.safetensors"), (Some(100), None));
        assert_eq!(of("step_000100.rank1.safetensors"), (Some(100), Some(1)));
        assert_eq!(of("step_000100/rank_3.safetensors"), (Some(100), Some(3)));
        assert_eq!(of("grads-100.npz"), (Some(100), None));
        assert_eq!(
            of("tensor_dumps/rank_2/iter_000017/layer1.fc1_gradient.pt"),
            (Some(17), Some(2))
        );
        assert_eq!(
            of("global_step500/mp_rank_00_model_states.pt"),
            (Some(500), Some(0))
        );
        assert_eq!(of("checkpoint-20/model.safetensors"), (Some(20), None));
        assert_eq!(of("000300.pt"), (Some(300), None));
        assert_eq!(of("0042/fc.weight.npy"), (Some(42), None));
    }

    #[test]
    fn names_that_are_no_steps_give_none() {
        for path in [
            "f16.npy",
            "version2.npy",
            "layer_3.npy",
            "grad_3.npy",
            "3.npy",
            "model-00001-of-00006.safetensors",
            "timestep_embed.weight.npy",
            "conv1.pt",
            "checkpoint-00001-of-00006.safetensors",
            "step_v2.npz",
            "step_99999999999999999999999.npz",
            "step.npz",
        ] {
            assert_eq!(of(path), (None, None), "{path}");
        }
        assert_eq!(usual("a.npz", Some("run-100")).step, None);
        assert_eq!(usual("a.npz", Some("step_7")).step, Some(7));
    }

    #[test]
    fn the_nearest_part_of_the_path_wins() {
        assert_eq!(of("step_1/step_2.npz"), (Some(2), None));
        assert_eq!(of("iter_5_step_6.npz"), (Some(6), None));
    }

    #[test]
    fn a_stem_loses_its_step_and_keeps_the_rest() {
        assert_eq!(
            without_step("decoder_fc1_wgrad_iter_000100"),
            "decoder_fc1_wgrad"
        );
        assert_eq!(without_step("step_3.fc"), ".fc");
        assert_eq!(without_step("step_3"), "step_3");
        assert_eq!(without_step("fc.weight"), "fc.weight");
        assert_eq!(
            of("tensor_dumps/rank_1/decoder_fc1_wgrad_iter_000100.pt"),
            (Some(100), Some(1))
        );
    }

    #[test]
    fn a_shard_is_told_from_a_step() {
        assert_eq!(shard("model-00001-of-00006"), Some(("model", 1, 6)));
        assert_eq!(shard("model-00007-of-00006"), None);
        assert_eq!(shard("one-of-two"), None);
        assert_eq!(of("step_7-00001-of-00002.safetensors"), (Some(7), None));
    }

    #[test]
    fn a_pattern_fits_whole_paths_only() {
        let find =
            |pattern: &str, path: &str| StepPattern::parse(pattern).expect(pattern).find(path);
        assert_eq!(find("g{step}", "g12.npz"), Some((Some(12), None)));
        assert_eq!(find("g{step}", "a/b/g12.npz"), Some((Some(12), None)));
        assert_eq!(find("g{step}", "xg12.npz"), None);
        assert_eq!(find("g{step}", "g12b.npz"), None);
        assert_eq!(find("*-{step}", "g7-12.npz"), Some((Some(12), None)));
        assert_eq!(
            find("r{rank}/*_{step}.pt", "r1/x_y_9.pt"),
            Some((Some(9), Some(1)))
        );
        assert_eq!(
            find("r{rank}/**{step}.pt", "r1/x/y9.pt"),
            Some((Some(9), Some(1)))
        );
        assert_eq!(find("r{rank}/*{step}.pt", "r1/x/y9.pt"), None);
        let facts = StepPattern::parse("{tensor}@{step}")
            .expect("fits")
            .facts("fc.weight@3.npy")
            .expect("fits");
        assert_eq!(
            (facts.tensor.as_deref(), facts.step),
            (Some("fc.weight"), Some(3))
        );
    }

    #[test]
    fn patterns_that_say_nothing_are_refused() {
        for bad in [
            "",
            "*",
            "x{step",
            "x}step",
            "{steps}",
            "{step}{step}",
            "{tensor}",
            "{step}*a*b*c*d*e*f*g*h*i",
        ] {
            assert!(
                matches!(
                    StepPattern::parse(bad),
                    Err(GradientsError::StepPattern { .. })
                ),
                "{bad}"
            );
        }
    }
}

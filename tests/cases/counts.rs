//! What the elements of a dump add up to, as `expected.json` has it.

use std::collections::BTreeMap;
use std::path::Path;

use gradscale::gradients::{Chunk, Dump, GradientsError, Options};
use serde_json::Value;

/// Counts over elements; `amax` and `smallest_nonzero` over the finite ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    pub elements: u64,
    pub zeros: u64,
    pub inf: u64,
    pub nan: u64,
    pub amax: Option<f32>,
    pub smallest_nonzero: Option<f32>,
}

impl Counts {
    pub fn add(&mut self, chunk: Chunk<'_>) {
        assert!(!chunk.is_empty(), "a chunk is never empty");
        for x in chunk.to_f32() {
            self.elements += 1;
            let x = x.abs();
            if x.is_nan() {
                self.nan += 1;
            } else if x.is_infinite() {
                self.inf += 1;
            } else {
                self.zeros += u64::from(x == 0.0);
                self.amax = Some(self.amax.map_or(x, |a| a.max(x)));
                if x > 0.0 {
                    self.smallest_nonzero = Some(self.smallest_nonzero.map_or(x, |s| s.min(x)));
                }
            }
        }
    }

    pub fn of(group: &Value) -> Counts {
        let count = |key: &str| group[key].as_u64().expect("a count");
        let float = |key: &str| group[key].as_f64().map(|x| x as f32);
        Counts {
            elements: count("elements"),
            zeros: count("zeros"),
            inf: count("inf"),
            nan: count("nan"),
            amax: float("amax"),
            smallest_nonzero: float("smallest_nonzero"),
        }
    }
}

/// Tensor and step.
pub type Key = (Option<String>, Option<u64>);

/// Counts of inputs that are ranks of one run, grouped `all`, by `tensor` or by `step`; and how many tensors were skipped.
pub fn counts_of(
    paths: &[&Path],
    by: &str,
) -> Result<(BTreeMap<Key, Counts>, usize), GradientsError> {
    let options = Options::new();
    let mut groups: BTreeMap<Key, Counts> = BTreeMap::new();
    let mut skipped = 0;
    for path in paths {
        let dump = Dump::open(path, &options)?;
        for step in dump.steps() {
            for file in &step.files {
                let open = file.open(&options)?;
                skipped += open.skipped().len();
                for (i, tensor) in open.tensors().iter().enumerate() {
                    let key = match by {
                        "all" => (None, None),
                        "tensor" => (Some(tensor.name.clone()), None),
                        _ => (None, step.step),
                    };
                    let group = groups.entry(key).or_default();
                    let before = group.elements;
                    open.read(i, &mut |chunk| group.add(chunk))?;
                    assert_eq!(group.elements - before, tensor.elements, "{}", tensor.name);
                }
            }
        }
    }
    Ok((groups, skipped))
}

/// A JSON file under the crate's root.
pub fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A folder of test data.
pub fn data(folder: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(folder)
}

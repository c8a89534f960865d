//! `.npz`: a zip archive of `.npy` members, stored or deflated.

use super::archive::{self, Member, Unpacked};
use super::npy::{self, Element};
use super::source::Source;
use super::tensor::{Encoding, Skipped, SkippedBecause};
use super::{GradientsError, Kind};

/// A member with float elements.
#[derive(Debug)]
pub(crate) struct Array {
    pub name: String,
    pub encoding: Encoding,
    pub shape: Vec<u64>,
    pub elements: u64,
    pub member: Member,
    /// The length of the member's own header.
    pub header_len: u64,
}

/// Reads the directory and each member's header.
pub(crate) fn open(
    source: &Source,
    selects: &dyn Fn(&str) -> bool,
) -> Result<(Vec<Array>, Vec<Skipped>), GradientsError> {
    let mut arrays = Vec::new();
    let mut skipped = Vec::new();
    for member in archive::directory(source, Kind::Npz)? {
        if member.name.ends_with('/') {
            continue;
        }
        let Some(name) = member.name.strip_suffix(".npy").map(str::to_string) else {
            let (name, dtype) = (member.name, "a member without .npy".to_string());
            skipped.push(Skipped {
                name,
                dtype,
                why: SkippedBecause::Trailing,
            });
            continue;
        };
        let mut bytes = Unpacked::new(source, Kind::Npz, &member)?;
        let header = npy::header(source, Kind::Npz, &name, 0, &mut bytes)?;
        match header.element {
            Element::Float(encoding) => {
                // npy::header has checked that the product fits; the sum of two such does too.
                let expected = header.len + header.elements * encoding.dtype.size_bytes();
                if member.size != expected {
                    return Err(GradientsError::SizeMismatch {
                        path: source.path.clone(),
                        tensor: name,
                        offset: header.len,
                        found: member.size.saturating_sub(header.len),
                        expected: expected - header.len,
                    });
                }
                let (shape, elements, header_len) = (header.shape, header.elements, header.len);
                arrays.push(Array {
                    name,
                    encoding,
                    shape,
                    elements,
                    member,
                    header_len,
                });
            }
            Element::Object if selects(&name) => {
                return Err(GradientsError::ObjectArray {
                    path: source.path.clone(),
                    tensor: name,
                });
            }
            Element::Object => {
                skipped.push(Skipped {
                    name,
                    dtype: "|O".to_string(),
                    why: SkippedBecause::NotNumbers,
                });
            }
            Element::Other { descr, why } => skipped.push(Skipped {
                name,
                dtype: descr,
                why,
            }),
        }
    }
    Ok((arrays, skipped))
}

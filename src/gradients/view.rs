//! Views: elements that do not lie one after another.
//!
//! Order does not matter to counts, so a view is first put into the order of the file: dimensions by falling stride,
//! neighbours that continue one another joined, expanded dimensions (stride 0) turned into a repeat count. A transposed
//! matrix becomes one run; a column stays a run with a stride.

use super::GradientsError;
use super::source::{BLOCK_BYTES, Bytes, Source};

/// Steps of at most this many bytes are worth reading over.
const DENSE_BYTES: u64 = 4096;

/// A view in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// (size, stride in elements), strides falling and none of them 0.
    dims: Vec<(u64, u64)>,
    /// How often each element is shown.
    repeat: u64,
}

impl View {
    /// `None` where shape and strides do not belong together or the view reaches past 2^63 elements.
    pub fn new(shape: &[u64], strides: &[u64]) -> Option<View> {
        if shape.len() != strides.len() {
            return None;
        }
        let mut view = View {
            dims: Vec::new(),
            repeat: 1,
        };
        if shape.contains(&0) {
            view.repeat = 0;
            return Some(view);
        }
        let mut dims: Vec<(u64, u64)> = Vec::new();
        for (&size, &stride) in shape.iter().zip(strides) {
            match (size, stride) {
                (1, _) => {}
                (_, 0) => view.repeat = view.repeat.checked_mul(size)?,
                _ => dims.push((size, stride)),
            }
        }
        dims.sort_by_key(|&(size, stride)| (std::cmp::Reverse(stride), size));
        for (size, stride) in dims {
            match view.dims.last_mut() {
                // The outer one steps exactly over the inner one: together they are one.
                Some((outer, outer_stride)) if Some(*outer_stride) == size.checked_mul(stride) => {
                    *outer = outer.checked_mul(size)?;
                    *outer_stride = stride;
                }
                _ => view.dims.push((size, stride)),
            }
        }
        let shown = view
            .dims
            .iter()
            .try_fold(view.repeat, |n, &(size, _)| n.checked_mul(size))?;
        (shown < 1 << 63 && view.reach()? < 1 << 63).then_some(view)
    }

    /// Elements from the first to the last one, inclusive; 0 for a view of nothing.
    pub fn reach(&self) -> Option<u64> {
        if self.repeat == 0 {
            return Some(0);
        }
        self.dims.iter().try_fold(1u64, |reach, &(size, stride)| {
            reach.checked_add((size - 1).checked_mul(stride)?)
        })
    }

    /// Whether it is just the elements one after another.
    pub fn is_run(&self) -> bool {
        self.repeat <= 1 && (self.dims.is_empty() || matches!(self.dims[..], [(_, 1)]))
    }
}

/// The elements of a view as bytes, from any element on.
pub(crate) struct ViewBytes<'a> {
    source: &'a Source,
    view: &'a View,
    tensor: &'a str,
    size: u64,
    /// Byte offset of the first element, and of the end of the last one.
    base: u64,
    end: u64,
    /// Where each dimension stands.
    index: Vec<u64>,
    /// Bytes to fetch beyond what is needed right now.
    ahead: u64,
    window: Vec<u8>,
    window_at: u64,
}

impl<'a> ViewBytes<'a> {
    /// `base`: byte offset of the view's first element; `first`: the element to begin with, in the view's own order.
    /// The caller has checked that the view lies inside the file.
    pub fn new(
        source: &'a Source,
        view: &'a View,
        tensor: &'a str,
        size: u64,
        base: u64,
        first: u64,
    ) -> ViewBytes<'a> {
        let mut index = vec![0; view.dims.len()];
        let mut rest = first;
        for (at, &(size, _)) in index.iter_mut().zip(&view.dims).rev() {
            *at = rest % size;
            rest /= size;
        }
        let step = match view.dims[..] {
            [.., (_, outer), (_, 1)] => outer,
            [.., (_, inner)] => inner,
            [] => 1,
        };
        let ahead = if step * size <= DENSE_BYTES {
            BLOCK_BYTES as u64
        } else {
            0
        };
        let end = base + view.reach().unwrap_or(0) * size;
        ViewBytes {
            source,
            view,
            tensor,
            size,
            base,
            end,
            index,
            ahead,
            window: Vec::new(),
            window_at: 0,
        }
    }

    /// Copies `into.len()` bytes that lie at `offset`, through the window.
    fn copy(&mut self, offset: u64, into: &mut [u8]) -> Result<(), GradientsError> {
        let wanted = into.len() as u64;
        let inside = offset >= self.window_at
            && offset + wanted <= self.window_at + self.window.len() as u64;
        if !inside {
            if wanted >= BLOCK_BYTES as u64 / 2 {
                return self.source.read_exact_at(offset, into, Some(self.tensor));
            }
            let fetch = wanted.max(self.ahead.min(self.end - offset));
            self.window.resize(fetch as usize, 0);
            self.window_at = offset;
            if let Err(e) = self
                .source
                .read_exact_at(offset, &mut self.window, Some(self.tensor))
            {
                self.window.clear();
                return Err(e);
            }
        }
        let at = (offset - self.window_at) as usize;
        into.copy_from_slice(&self.window[at..at + into.len()]);
        Ok(())
    }
}

impl Bytes for ViewBytes<'_> {
    /// `buffer` holds whole elements.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), GradientsError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let element: u64 = self
                .index
                .iter()
                .zip(&self.view.dims)
                .map(|(at, (_, stride))| at * stride)
                .sum();
            let offset = self.base + element * self.size;
            let run = match (self.index.last(), self.view.dims.last()) {
                (Some(at), Some(&(size, 1))) => size - at,
                _ => 1,
            };
            let wanted = ((run * self.size) as usize).min(buffer.len() - filled);
            self.copy(offset, &mut buffer[filled..filled + wanted])?;
            filled += wanted;
            let mut steps = wanted as u64 / self.size;
            for (at, &(size, _)) in self.index.iter_mut().zip(&self.view.dims).rev() {
                *at += steps;
                if *at < size {
                    break;
                }
                *at = 0;
                steps = 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(shape: &[u64], strides: &[u64]) -> View {
        View::new(shape, strides).expect("a view")
    }

    #[test]
    fn transposed_and_permuted_views_are_runs() {
        assert!(view(&[3, 5], &[5, 1]).is_run());
        assert!(view(&[5, 3], &[1, 5]).is_run());
        assert!(view(&[2, 3, 4], &[1, 8, 2]).is_run());
        assert!(view(&[1, 7, 1], &[99, 1, 0]).is_run());
        assert!(view(&[], &[]).is_run());
        assert!(view(&[0, 4], &[4, 1]).is_run());
        assert!(!view(&[4, 3], &[0, 1]).is_run());
        assert!(!view(&[4, 3], &[5, 1]).is_run());
        assert!(!view(&[4], &[2]).is_run());
    }

    #[test]
    fn views_beyond_63_bits_are_refused() {
        assert_eq!(View::new(&[3], &[1 << 62]), None);
        assert_eq!(View::new(&[1 << 32, 1 << 32], &[0, 0]), None);
        assert_eq!(View::new(&[2, 2], &[u64::MAX, u64::MAX]), None);
        assert_eq!(View::new(&[2], &[1, 1]), None);
        assert_eq!(view(&[0], &[u64::MAX]).reach(), Some(0));
        assert_eq!(view(&[3, 2], &[10, 3]).reach(), Some(24));
    }

    #[test]
    fn every_element_is_shown_as_often_as_the_view_says_from_any_element_on() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let bytes: Vec<u8> = (0..4000u16).flat_map(u16::to_le_bytes).collect();
        std::io::Write::write_all(&mut file, &bytes).expect("written");
        let source = Source::open(file.path(), false).expect("opened");
        let shapes: [(&[u64], &[u64]); 9] = [
            (&[4, 3], &[0, 1]),
            (&[4, 3], &[7, 2]),
            (&[5, 4, 3], &[1, 20, 100]),
            (&[2, 3, 2], &[3000, 0, 1]),
            (&[3, 3], &[1, 1]),
            (&[6], &[600]),
            (&[2, 2, 2, 2], &[900, 0, 11, 3]),
            (&[], &[]),
            (&[40, 40], &[90, 2]),
        ];
        for (shape, strides) in shapes {
            let view = view(shape, strides);
            // By the definition: every index of the shape.
            let mut want = vec![0u64];
            for (&size, &stride) in shape.iter().zip(strides) {
                want = want
                    .iter()
                    .flat_map(|at| (0..size).map(move |i| at + i * stride))
                    .collect();
            }
            want.sort_unstable();
            let read = |first: u64, count: u64| {
                let mut bytes = ViewBytes::new(&source, &view, "t", 2, 10, first);
                let mut buffer = vec![0u8; count as usize * 2];
                let (front, back) = buffer.split_at_mut(count as usize / 2 * 2);
                bytes.fill(front).expect("inside");
                bytes.fill(back).expect("inside");
                buffer
                    .chunks(2)
                    .map(|b| u64::from(u16::from_le_bytes([b[0], b[1]])) - 5)
                    .collect::<Vec<u64>>()
            };
            let n = want.len() as u64;
            let all = read(0, n);
            for first in 0..n {
                assert_eq!(
                    read(first, n - first),
                    all[first as usize..],
                    "{shape:?} from {first}"
                );
            }
            let mut all = all;
            all.sort_unstable();
            assert_eq!(all, want, "{shape:?} {strides:?}");
        }
    }
}

//! 16-bit floats, counted by bit pattern.
//!
//! There are only 65,536 of them. One counter each, and the element itself need never be widened: what it would have
//! been is asked once a pattern, at the end.

/// Patterns.
const PATTERNS: usize = 1 << 16;
/// The counters are merged before one could run over.
const MOST: u64 = u32::MAX as u64;

/// How often each of the 65,536 patterns was seen.
///
/// Two sets of counters take turns, so that equal neighbours do not wait for each other.
#[derive(Debug, Clone)]
pub(super) struct Halves {
    counts: Box<[[u32; PATTERNS]; 2]>,
    /// What no longer fits there; hardly ever needed.
    more: Vec<u64>,
    /// Elements in `counts`.
    held: u64,
}

impl Halves {
    pub fn new() -> Halves {
        Halves {
            counts: vec![[0u32; PATTERNS]; 2]
                .into_boxed_slice()
                .try_into()
                .expect("the length is 2"),
            more: Vec::new(),
            held: 0,
        }
    }

    /// Counts the patterns of `bits`.
    pub fn add(&mut self, bits: &[u16]) {
        if self.held + bits.len() as u64 > MOST {
            self.settle();
        }
        self.held += bits.len() as u64;
        let [even, odd] = &mut *self.counts;
        let (fours, rest) = bits.as_chunks::<4>();
        for &[a, b, c, d] in fours {
            even[usize::from(a)] += 1;
            odd[usize::from(b)] += 1;
            even[usize::from(c)] += 1;
            odd[usize::from(d)] += 1;
        }
        for &a in rest {
            even[usize::from(a)] += 1;
        }
    }

    fn settle(&mut self) {
        self.more.resize(PATTERNS, 0);
        for counts in &mut *self.counts {
            for (more, count) in self.more.iter_mut().zip(counts) {
                *more += u64::from(std::mem::take(count));
            }
        }
        self.held = 0;
    }

    /// Shows each pattern that was seen, ascending, with how often; the counters are empty afterwards.
    pub fn take(&mut self, mut show: impl FnMut(u16, u64)) {
        if self.held == 0 && self.more.is_empty() {
            return;
        }
        let [even, odd] = &mut *self.counts;
        let (even, odd) = (even.as_chunks_mut::<16>().0, odd.as_chunks_mut::<16>().0);
        for (place, (even, odd)) in even.iter_mut().zip(odd).enumerate() {
            let seen = even.iter().zip(&*odd).fold(0, |any, (a, b)| any | a | b);
            if seen == 0 && self.more.is_empty() {
                continue;
            }
            for (lane, (even, odd)) in even.iter_mut().zip(odd).enumerate() {
                let pattern = place * 16 + lane;
                let more = self.more.get(pattern).copied().unwrap_or(0);
                let times = u64::from(std::mem::take(even)) + u64::from(std::mem::take(odd)) + more;
                if times > 0 {
                    show(pattern as u16, times);
                }
            }
        }
        self.more = Vec::new();
        self.held = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "65,536 counters take an interpreter minutes")]
    fn every_pattern_is_shown_as_often_as_it_was_seen_and_then_forgotten() {
        let mut halves = Halves::new();
        let bits: Vec<u16> = (0..=u16::MAX)
            .flat_map(|x| std::iter::repeat_n(x, usize::from(x % 3)))
            .collect();
        for settled in [false, true] {
            halves.add(&bits[..5]);
            halves.add(&bits[5..]);
            if settled {
                halves.settle();
                halves.add(&bits);
            }
            let times = if settled { 2 } else { 1 };
            let mut shown = Vec::new();
            halves.take(|pattern, count| shown.push((pattern, count)));
            let expected: Vec<(u16, u64)> = (0..=u16::MAX)
                .filter(|x| x % 3 > 0)
                .map(|x| (x, u64::from(x % 3) * times))
                .collect();
            assert_eq!(shown, expected);
            halves.take(|_, _| panic!("it was emptied"));
        }
    }
}

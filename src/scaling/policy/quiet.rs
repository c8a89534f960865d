//! How many clean steps lie before a growth rule fires, for the two families of rules.

/// Steps before a counter that grows by one a step reaches `window` in the step that compares it by equality; for ever
/// where it is past it already.
pub(super) fn counts_to(counter: i64, window: i64) -> u64 {
    u64::try_from(window.saturating_sub(1).saturating_sub(counter)).unwrap_or(i64::MAX as u64)
}

/// As [`counts_to`] where the comparison is "at least": at once where it is past.
pub(super) fn counts_to_at_least(counter: i64, window: i64) -> u64 {
    u64::try_from(window.saturating_sub(1).saturating_sub(counter)).unwrap_or(0)
}

/// Steps before a number that grows by one a step is a multiple of `window` (positive): 0 where it is one now.
pub(super) fn to_multiple(since: i64, window: i64) -> u64 {
    match since.rem_euclid(window.max(1)) {
        0 => 0,
        into => (window - into) as u64,
    }
}

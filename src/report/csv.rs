//! Results as CSV: tidy, one observation a row, a header always.

use crate::scaling::policy::Policy;
use crate::scaling::{Segment, Timeline};
use std::io::Write;

/// The columns of a trajectory.
pub const TRAJECTORY_HEADER: &str = "run,policy,step,loss_scale,found_inf,skipped\n";

/// One row a step: the scale it ran at, whether it overflowed and was left out.
///
/// # Errors
/// When `out` refuses.
pub fn trajectory(
    timeline: &Timeline<'_>,
    policy: &dyn Policy,
    run: usize,
    name: &str,
    out: &mut dyn Write,
) -> std::io::Result<()> {
    let first = timeline.run().first_step;
    let mut result = Ok(());
    let name = crate::text::csv_field(name);
    timeline.replay(policy.clone_box().as_mut(), &mut |segment: &Segment| {
        for at in segment.from..segment.to {
            if result.is_ok() {
                result = writeln!(
                    out,
                    "{run},{name},{},{},{},{}",
                    first + at as u64,
                    segment.scale,
                    u8::from(segment.overflowed),
                    u8::from(segment.skipped)
                );
            }
        }
    });
    result
}

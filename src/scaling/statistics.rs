//! How sure a mean over dependent steps is.
//!
//! Steps of a training run depend on each other, so their costs are resampled in blocks: the stationary bootstrap
//! (Politis and Romano 1994), whose blocks start anywhere, wrap around the end and have geometrically distributed
//! lengths, with the mean length that Politis and White (2004, corrected by Patton, Politis and White 2009) derive from
//! the series itself. Everything is seeded; the same run gives the same interval.

/// SplitMix64 (Steele, Lea and Flood 2014): small, and good enough to draw blocks.
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1].
    pub fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `0..bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.bits()) * bound as u128) >> 64) as usize
    }
}

/// Longer series are averaged over equal stretches before their autocorrelation is taken.
const LONGEST_SERIES: usize = 1 << 17;

/// The mean block length of the stationary bootstrap for the mean of `series`, at least 1.
///
/// Source: Politis and White (2004), section 3.2, with the correction of Patton, Politis and White (2009); the bandwidth
/// is twice the first lag after which max(5, log10 n) autocorrelations in a row lie below 2·sqrt(log10 n / n).
pub fn block_length(series: &[f64]) -> f64 {
    let stretch = series.len().div_ceil(LONGEST_SERIES).max(1);
    if stretch == 1 {
        return block_length_of(series);
    }
    let averaged: Vec<f64> = series
        .chunks_exact(stretch)
        .map(|chunk| chunk.iter().sum::<f64>() / stretch as f64)
        .collect();
    block_length_of(&averaged) * stretch as f64
}

fn block_length_of(series: &[f64]) -> f64 {
    let n = series.len();
    if n < 8 {
        return 1.0;
    }
    let mean = series.iter().sum::<f64>() / n as f64;
    let centred: Vec<f64> = series.iter().map(|x| x - mean).collect();
    let total: f64 = centred.iter().map(|x| x * x).sum();
    if total <= f64::MIN_POSITIVE {
        return 1.0;
    }
    let size = n as f64;
    let in_a_row = 5.max(size.log10() as usize);
    let last_lag = (size.sqrt().ceil() as usize + in_a_row).min(n - 2);
    let significant = 2.0 * (size.log10() / size).sqrt();
    let covariance = |lag: usize| -> f64 {
        centred[lag..]
            .iter()
            .zip(&centred)
            .map(|(a, b)| a * b)
            .sum::<f64>()
            / size
    };
    let mut covariances = Vec::with_capacity(last_lag + 1);
    // Energies of the series without its first and without its last lag + 1 elements.
    let (mut without_first, mut without_last) = (total, total);
    let mut quiet = 0;
    let mut found = None;
    for lag in 0..=last_lag {
        without_first -= centred[lag] * centred[lag];
        without_last -= centred[n - 1 - lag] * centred[n - 1 - lag];
        let c = covariance(lag);
        covariances.push(c);
        // The lags before this one decide: in_a_row of them below the limit end the search.
        if quiet >= in_a_row {
            found = Some(lag - in_a_row);
            break;
        }
        let correlation = (c * size).abs() / (without_first * without_last).sqrt();
        quiet = if correlation < significant {
            quiet + 1
        } else {
            0
        };
    }
    let bandwidth = found.map_or(last_lag, |lag| 2 * lag.max(1)).min(last_lag);
    while covariances.len() <= bandwidth {
        covariances.push(covariance(covariances.len()));
    }
    let (mut weighted, mut spectrum) = (0.0, covariances[0]);
    for (lag, c) in covariances.iter().enumerate().take(bandwidth + 1).skip(1) {
        let t = lag as f64 / bandwidth as f64;
        let taper = if t <= 0.5 { 1.0 } else { 2.0 * (1.0 - t) };
        weighted += 2.0 * taper * lag as f64 * c;
        spectrum += 2.0 * taper * c;
    }
    let longest = (3.0 * size.sqrt()).min(size / 3.0).ceil();
    let length = (weighted * weighted / (spectrum * spectrum)).cbrt() * size.cbrt();
    if length.is_finite() {
        length.clamp(1.0, longest)
    } else {
        longest
    }
}

/// The blocks of one resampling: starts and lengths that add up to `n`.
pub fn blocks(
    n: usize,
    mean_length: f64,
    random: &mut Random,
    visit: &mut dyn FnMut(usize, usize),
) {
    let ending = 1.0 / mean_length.max(1.0);
    let mut left = n;
    while left > 0 {
        let start = random.below(n);
        let length = if ending >= 1.0 {
            1
        } else {
            let drawn = (random.unit().ln() / (1.0 - ending).ln()).floor();
            1 + if drawn < left as f64 {
                drawn as usize
            } else {
                left
            }
        };
        let length = length.min(left);
        visit(start, length);
        left -= length;
    }
}

/// The means of several series resampled with the same blocks, from their prefix sums (each one longer than its series,
/// the first sum 0; all of one length).
pub fn resampled_means(prefixes: &[Vec<f64>], mean_length: f64, random: &mut Random) -> Vec<f64> {
    let n = prefixes.first().map_or(0, |prefix| prefix.len() - 1);
    let mut sums = vec![0.0; prefixes.len()];
    blocks(n, mean_length, random, &mut |start, length| {
        let end = start + length;
        for (sum, prefix) in sums.iter_mut().zip(prefixes) {
            *sum += if end <= n {
                prefix[end] - prefix[start]
            } else {
                // Blocks wrap around the end of the series.
                prefix[n] - prefix[start] + prefix[end - n]
            };
        }
    });
    sums.into_iter().map(|sum| sum / n as f64).collect()
}

/// The `p` quantile (0 < p < 1) of Student's t distribution with `freedom` degrees of freedom, by the expansion about the
/// normal quantile (Abramowitz & Stegun 26.7.5); within 1 % from 3 degrees of freedom on.
pub fn student_quantile(p: f64, freedom: f64) -> f64 {
    let z = normal_quantile(p);
    let g1 = (z.powi(3) + z) / 4.0;
    let g2 = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
    let g3 = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
    let g4 = (79.0 * z.powi(9) + 776.0 * z.powi(7) + 1482.0 * z.powi(5)
        - 1920.0 * z.powi(3)
        - 945.0 * z)
        / 92160.0;
    z + g1 / freedom + g2 / freedom.powi(2) + g3 / freedom.powi(3) + g4 / freedom.powi(4)
}

/// The `p` quantile (0 < p < 1) of the normal distribution: Newton's method on its series.
fn normal_quantile(p: f64) -> f64 {
    // Φ(x) = 1/2 + φ(x)·(x + x³/3 + x⁵/15 + …), Marsaglia 2004.
    let cumulative = |x: f64| {
        let (mut sum, mut term, mut n) = (x, x, 1.0);
        while term.abs() > 1e-17 && n < 400.0 {
            n += 2.0;
            term *= x * x / n;
            sum += term;
        }
        0.5 + sum * density(x)
    };
    let mut x = 0.0;
    for _ in 0..50 {
        let step = (cumulative(x) - p) / density(x).max(1e-12);
        x -= step.clamp(-1.0, 1.0);
        if step.abs() < 1e-13 {
            break;
        }
    }
    x
}

fn density(x: f64) -> f64 {
    (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt()
}

/// The `p` quantile of `sorted` values (ascending), linear between neighbours.
pub fn quantile(sorted: &[f64], p: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = p.clamp(0.0, 1.0) * last as f64;
    let (low, share) = (place.floor() as usize, place.fract());
    let high = (low + 1).min(last);
    sorted[low] + share * (sorted[high] - sorted[low])
}

/// The upper end of the one-sided 95 % interval of a rate of which `events` were seen in `trials`.
///
/// Exact (Clopper and Pearson 1934); with no event it is about 3 / trials, the rule of three. `trials` may be an
/// effective number, smaller than that of the steps where these depend on each other.
pub fn rate_at_most(events: f64, trials: f64) -> f64 {
    if trials <= 0.0 || events >= trials {
        return 1.0;
    }
    // The rate at which seeing this few events has a chance of 5 %.
    let (mut low, mut high) = (events / trials, 1.0);
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if chance_of_at_most(events, trials, middle) > 0.05 {
            low = middle
        } else {
            high = middle
        }
    }
    high
}

/// P(X ≤ k) of a binomial, by the sum of its terms; `trials` need not be whole (its terms are those of the gamma function).
fn chance_of_at_most(k: f64, trials: f64, p: f64) -> f64 {
    if p >= 1.0 {
        return 0.0;
    }
    let mut term = trials * (-p).ln_1p();
    let mut sum = term.exp();
    for i in 0..k.floor() as u64 {
        let i = i as f64;
        if trials - i <= 0.0 {
            break;
        }
        term += ((trials - i) / (i + 1.0)).ln() + (p / (1.0 - p)).ln();
        sum += term.exp();
    }
    sum.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Length, autoregression, seed and what `arch` gives.
    const EXPECTED: [(usize, f64, u64, f64); 5] = [
        (500, 0.0, 1, 2.864_853_236_009_094),
        (2000, 0.5, 2, 16.283_886_723_595_913),
        (5000, 0.9, 3, 93.605_447_794_770_94),
        (20_000, 0.99, 4, 338.631_422_091_753_45),
        (1000, -0.5, 5, 10.596_436_838_830_982),
    ];

    /// An autoregressive series from a linear congruential generator, which any language can repeat.
    fn series(n: usize, rho: f64, mut seed: u64) -> Vec<f64> {
        let mut x = 0.0;
        (0..n)
            .map(|i| {
                seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let noise = (seed >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
                x = if i == 0 { noise } else { rho * x + noise };
                x
            })
            .collect()
    }

    #[test]
    fn block_lengths_equal_those_of_the_python_package_arch() {
        // arch.bootstrap.optimal_block_length(x)["stationary"] of arch 8.0.0 on the same series.
        for (n, rho, seed, expected) in EXPECTED {
            let length = block_length(&series(n, rho, seed));
            assert!(
                (length - f64::max(expected, 1.0)).abs() < 1e-6 * expected,
                "{n} {rho}: {length}, expected {expected}"
            );
        }
    }

    #[test]
    fn a_constant_series_needs_no_blocks() {
        assert_eq!(block_length(&[0.25; 1000]), 1.0);
    }

    #[test]
    fn blocks_add_up_and_have_the_mean_length_asked_for() {
        let mut random = Random::new(1);
        let (mut count, mut total) = (0, 0);
        for _ in 0..200 {
            let mut sum = 0;
            blocks(10_000, 25.0, &mut random, &mut |start, length| {
                assert!(start < 10_000 && length >= 1);
                sum += length;
                count += 1;
            });
            assert_eq!(sum, 10_000);
            total += sum;
        }
        let mean = f64::from(total as u32) / f64::from(count);
        assert!((mean - 25.0).abs() < 0.5, "{mean}");
    }

    #[test]
    fn resampled_means_spread_as_the_theory_says() {
        // Independent values: the variance of the mean is that of one value over n.
        let values = series(4000, 0.0, 9);
        let prefix: Vec<f64> = std::iter::once(0.0)
            .chain(values.iter().scan(0.0, |sum, x| {
                *sum += x;
                Some(*sum)
            }))
            .collect();
        let prefixes = [prefix];
        let mut random = Random::new(7);
        let means: Vec<f64> = (0..2000)
            .map(|_| resampled_means(&prefixes, 1.0, &mut random)[0])
            .collect();
        let centre = means.iter().sum::<f64>() / 2000.0;
        let spread = (means.iter().map(|m| (m - centre).powi(2)).sum::<f64>() / 2000.0).sqrt();
        let expected = (1.0f64 / 12.0 / 4000.0).sqrt();
        assert!(
            (spread / expected - 1.0).abs() < 0.06,
            "{spread} {expected}"
        );
    }

    #[test]
    fn rates_have_the_exact_upper_limit() {
        assert!(
            (rate_at_most(0.0, 1000.0) - 0.002_991_2).abs() < 1e-6,
            "the rule of three"
        );
        // scipy.stats.beta.ppf(0.95, k + 1, n - k)
        assert!(
            (rate_at_most(5.0, 100.0) - 0.102_253_378).abs() < 1e-6,
            "{}",
            rate_at_most(5.0, 100.0)
        );
        assert_eq!(rate_at_most(3.0, 3.0), 1.0);
    }

    #[test]
    fn students_quantiles_are_those_of_the_tables() {
        for (freedom, expected) in [
            (3.0, 3.182),
            (5.0, 2.571),
            (9.0, 2.262),
            (30.0, 2.042),
            (1e9, 1.960),
        ] {
            let found = student_quantile(0.975, freedom);
            assert!(
                (found - expected).abs() < 0.01 * expected,
                "{freedom}: {found}"
            );
        }
        assert!((normal_quantile(0.95) - 1.644_853_626_951).abs() < 1e-9);
    }

    #[test]
    fn quantiles_interpolate() {
        assert_eq!(quantile(&[1.0, 2.0, 3.0], 0.5), 2.0);
        assert_eq!(quantile(&[1.0, 2.0], 0.25), 1.25);
        assert!(quantile(&[], 0.5).is_nan());
    }
}

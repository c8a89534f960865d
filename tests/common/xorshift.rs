//! Random data for the kernel's tests and benches.

#![allow(dead_code)] // Not every program that brings in this module needs all of it.

/// xorshift64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    pub fn sign(&mut self) -> f64 {
        if self.next() >> 40 & 1 == 0 {
            1.0
        } else {
            -1.0
        }
    }
}

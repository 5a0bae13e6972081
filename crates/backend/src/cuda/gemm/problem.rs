//! Which products share an algorithm.

use std::fmt;

use super::{Next, Product, descriptor::Layouts};
use crate::{
    BackendError,
    cuda::{memory::Element, weights::MatrixPlace},
};

/// Products that share an algorithm: the same but for the number of rows within a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::cuda) struct Problem {
    /// Most rows: a [`row_bucket`].
    pub(super) num_rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) bias: bool,
    pub(super) accumulate: bool,
    /// Whether the output is f32 rather than bf16.
    pub(super) f32_out: bool,
    pub(super) weights: WeightKind,
    pub(super) next: NextKind,
}

/// What comes next, see [`Next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum NextKind {
    Nothing,
    Silu,
    Norm,
    Rope,
}

/// What the weights are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::cuda) enum WeightKind {
    Bf16,
    /// Codes with a scale for each row.
    Fp8,
    /// Codes with a scale for each 128 columns of a row.
    Fp8Blocks,
}

impl WeightKind {
    pub(super) fn of(place: MatrixPlace) -> Self {
        match place {
            MatrixPlace::Bf16(_) => Self::Bf16,
            MatrixPlace::Fp8 { blocks: false, .. } => Self::Fp8,
            MatrixPlace::Fp8 { blocks: true, .. } => Self::Fp8Blocks,
        }
    }
}

impl Problem {
    pub(super) fn of(product: &Product) -> Self {
        Self {
            num_rows: row_bucket(product.num_rows),
            n: product.n,
            k: product.k,
            bias: product.bias.is_some(),
            accumulate: product.accumulate,
            f32_out: product.out_element != Element::Bf16,
            weights: WeightKind::of(product.weight),
            next: match product.next {
                Next::Nothing => NextKind::Nothing,
                Next::Silu { .. } => NextKind::Silu,
                Next::Norm(_) => NextKind::Norm,
                Next::Rope => NextKind::Rope,
            },
        }
    }

    /// The product alone.
    pub(super) fn alone(self) -> Self {
        Self { next: NextKind::Nothing, ..self }
    }

    /// The same with as many rows as the powers of two below and above; itself, if it is one.
    pub(super) fn neighbours(self) -> [Self; 2] {
        let above = self.num_rows.next_power_of_two();
        let below = if above == self.num_rows { above } else { above / 2 };
        [below, above].map(|num_rows| Self { num_rows, ..self })
    }

    pub(super) fn out_element(self) -> Element {
        if self.f32_out { Element::F32 } else { Element::Bf16 }
    }

    /// Layouts with both operands as `operands`.
    pub(super) fn layouts(self, operands: Element) -> Result<Layouts, BackendError> {
        Layouts::new((self.num_rows, self.n, self.k), operands, self.out_element())
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { num_rows, n, k, .. } = self;
        write!(f, "{num_rows}x{n}x{k}")?;
        for (set, mark) in [(self.bias, "+bias"), (self.accumulate, "+add"), (self.f32_out, "+f32")]
        {
            f.write_str(if set { mark } else { "" })?;
        }
        f.write_str(match self.weights {
            WeightKind::Bf16 => "",
            WeightKind::Fp8 => "+fp8",
            WeightKind::Fp8Blocks => "+fp8blocks",
        })?;
        f.write_str(match self.next {
            NextKind::Nothing => "",
            NextKind::Silu => "+silu",
            NextKind::Norm => "+norm",
            NextKind::Rope => "+rope",
        })
    }
}

/// The smallest bucket that holds `num_rows`. Fine where decode steps are padded to it, coarse
/// above.
///
/// 1, 2, 4, then multiples of 8 up to 64, of 16 up to 128, of 32 up to 256, then powers of two.
pub(in crate::cuda) fn row_bucket(num_rows: usize) -> usize {
    match num_rows {
        0..=4 => num_rows.next_power_of_two(),
        5..=64 => num_rows.next_multiple_of(8),
        65..=128 => num_rows.next_multiple_of(16),
        129..=256 => num_rows.next_multiple_of(32),
        _ => num_rows.next_power_of_two(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_powers_of_two() {
        let problem = Problem {
            num_rows: 40,
            n: 8,
            k: 8,
            bias: false,
            accumulate: false,
            f32_out: false,
            weights: WeightKind::Fp8,
            next: NextKind::Silu,
        };
        assert_eq!(problem.to_string(), "40x8x8+fp8+silu");
        let rows = |num_rows| Problem { num_rows, ..problem }.neighbours().map(|p| p.num_rows);
        assert_eq!([rows(1), rows(8), rows(40)], [[1, 1], [8, 8], [32, 64]]);
        assert_eq!([rows(224), rows(256)], [[128, 256], [256, 256]]);
    }

    #[test]
    fn buckets_hold_their_rows_and_waste_little() {
        for (num_rows, bucket) in
            [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 24), (32, 32), (33, 40)]
        {
            assert_eq!(row_bucket(num_rows), bucket);
        }
        for (num_rows, bucket) in [(64, 64), (65, 80), (129, 160), (256, 256), (257, 512)] {
            assert_eq!(row_bucket(num_rows), bucket);
        }
        let buckets: Vec<usize> = (1..=256).map(row_bucket).collect();
        assert!(buckets.iter().zip(1..).all(|(bucket, num_rows)| *bucket >= num_rows));
        assert!(buckets.is_sorted());
        assert!(buckets.iter().all(|bucket| row_bucket(*bucket) == *bucket));
        let mut distinct = buckets;
        distinct.dedup();
        assert_eq!(distinct.len(), 19);
    }
}

//! The state of a running softmax, for several rows.

/// For every row: the greatest score so far, and relative to it the sum of the weights and the
/// weighted sum of the values.
pub(super) struct Running<'a> {
    /// `[num_rows]`; -infinity where nothing was seen.
    pub(super) max: &'a mut [f32],
    /// `[num_rows]`.
    pub(super) sum: &'a mut [f32],
    /// `[num_rows, head_stride]`.
    pub(super) values: &'a mut [f32],
}

impl Running<'_> {
    /// Floats that [`Running::copy_to`] writes.
    pub(super) fn num_floats(num_rows: usize, head_stride: usize) -> usize {
        num_rows * (2 + head_stride)
    }

    /// Nothing seen.
    pub(super) fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.values.fill(0.0);
    }

    /// Saves the state.
    pub(super) fn copy_to(&self, place: &mut [f32]) {
        let (max, rest) = place.split_at_mut(self.max.len());
        let (sum, values) = rest.split_at_mut(self.sum.len());
        max.copy_from_slice(self.max);
        sum.copy_from_slice(self.sum);
        values.copy_from_slice(self.values);
    }

    /// Restores a saved state.
    pub(super) fn copy_from(&mut self, place: &[f32]) {
        let (max, rest) = place.split_at(self.max.len());
        let (sum, values) = rest.split_at(self.sum.len());
        self.max.copy_from_slice(max);
        self.sum.copy_from_slice(sum);
        self.values.copy_from_slice(values);
    }

    /// Adds what `next` has seen. Rows that either has not seen keep the other's exact numbers.
    pub(super) fn join(&mut self, next: &Self) {
        let head_stride = self.values.len() / self.max.len();
        let rows = self.values.chunks_exact_mut(head_stride);
        for (row, (values, next_values)) in
            rows.zip(next.values.chunks_exact(head_stride)).enumerate()
        {
            if next.max[row] == f32::NEG_INFINITY && next.sum[row] == 0.0 {
                continue;
            }
            if self.max[row] == f32::NEG_INFINITY && self.sum[row] == 0.0 {
                self.max[row] = next.max[row];
                self.sum[row] = next.sum[row];
                values.copy_from_slice(next_values);
                continue;
            }
            let max = self.max[row].max(next.max[row]);
            let (old, new) = ((self.max[row] - max).exp(), (next.max[row] - max).exp());
            self.max[row] = max;
            self.sum[row] = self.sum[row] * old + next.sum[row] * new;
            for (value, next_value) in values.iter_mut().zip(next_values) {
                *value = *value * old + next_value * new;
            }
        }
    }

    /// Writes the softmax-weighted mean of a row's values.
    pub(super) fn finish(&self, row: usize, out: &mut [f32]) {
        let head_stride = self.values.len() / self.max.len();
        let scale = 1.0 / self.sum[row];
        for (out, value) in out.iter_mut().zip(&self.values[row * head_stride..]) {
            *out = value * scale;
        }
    }
}

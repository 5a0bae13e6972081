//! The roofline: an operator takes as long as its bytes or its operations, whichever is longer, and
//! what it costs to begin.

use inflight_backend::AttentionShape;

use super::Gpu;

/// One row of a step as attention sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLoad {
    /// New tokens.
    pub len: usize,
    /// Tokens to attend to, the new ones included.
    pub context_len: usize,
}

/// Seconds of every operator on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// The device.
    pub gpu: Gpu,
    /// Bytes of an activation.
    pub activation_bytes: f64,
    /// Bytes of a number of the KV cache.
    pub kv_bytes: f64,
}

/// Seconds of decode attention besides reading the cache: for a launch and for each row.
const DECODE_S: f64 = 3.5e-6;
const DECODE_ROW_S: f64 = 0.08e-6;
/// Share of the matrix rate that attention over a long prompt reaches, and the length at which it
/// reaches half of that.
const ATTENTION_SHARE: f64 = 0.775;
const HALF_RATE_TOKENS: f64 = 1100.0;
/// A GPU slows down under large products: by this share from this many rows on.
const HOT_LOSS: f64 = 0.13;
const HOT_ROWS: f64 = 8192.0;
/// Seconds that sampling takes besides reading its logits.
const SAMPLE_S: f64 = 10e-6;

impl CostModel {
    /// For activations and a KV cache of 16 bits.
    #[must_use]
    pub fn new(gpu: Gpu) -> Self {
        Self { gpu, activation_bytes: 2.0, kv_bytes: 2.0 }
    }

    /// A product of `num_rows` rows with a matrix `[rows, cols]` of so many bytes.
    #[must_use]
    pub fn matmul(
        &self,
        num_rows: usize,
        [rows, cols]: [usize; 2],
        weight_bytes: f64,
        is_fp8: bool,
    ) -> f64 {
        let (n, rows, cols) = (num_rows as f64, rows as f64, cols as f64);
        let Gpu { bytes_per_s, half_rate_rows, fp8_bandwidth_share, .. } = self.gpu;
        let share = if is_fp8 { fp8_bandwidth_share } else { 1.0 };
        let bytes = weight_bytes / share + n * (rows + cols) * self.activation_bytes;
        let peak = if is_fp8 { self.gpu.fp8_flop_per_s } else { self.gpu.flop_per_s };
        let hot = 1.0 - HOT_LOSS * (n / HOT_ROWS).min(1.0);
        let rate = peak * hot * n / (n + half_rate_rows);
        let operations_s = 2.0 * n * rows * cols / rate.max(1.0);
        self.gpu.operator_s + operations_s.max(bytes / bytes_per_s)
    }

    /// An operator that only reads and writes.
    #[must_use]
    pub fn elementwise(&self, bytes: f64) -> f64 {
        self.gpu.operator_s + bytes / self.gpu.bytes_per_s
    }

    /// Attention of one layer.
    #[must_use]
    pub fn attention(&self, rows: impl Iterator<Item = RowLoad>, shape: AttentionShape) -> f64 {
        let token_bytes = 2.0 * (shape.num_kv_heads * shape.head_dim) as f64 * self.kv_bytes;
        let pair_flop = 4.0 * shape.q_len() as f64;
        let (mut seconds, mut num_decodes) = (self.gpu.operator_s, 0.0);
        for RowLoad { len, context_len } in rows {
            let (n, context) = (len as f64, context_len as f64);
            let read_s = context * token_bytes / self.gpu.bytes_per_s;
            if len == 1 {
                num_decodes += 1.0;
                seconds += read_s;
                continue;
            }
            let share = ATTENTION_SHARE * n / (n + HALF_RATE_TOKENS);
            let pairs = n * (context - n) + n * (n + 1.0) / 2.0;
            seconds += (pairs * pair_flop / (share * self.gpu.flop_per_s)).max(read_s);
        }
        if num_decodes > 0.0 {
            seconds += DECODE_S + DECODE_ROW_S * num_decodes;
        }
        seconds
    }

    /// Sampling of rows of `vocab_size` logits: read twice.
    #[must_use]
    pub fn sample(&self, num_rows: usize, vocab_size: usize) -> f64 {
        SAMPLE_S + self.elementwise(8.0 * (num_rows * vocab_size) as f64)
    }

    /// A copy between host and device.
    #[must_use]
    pub fn link(&self, bytes: f64) -> f64 {
        self.gpu.link_s + bytes / self.gpu.link_bytes_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, without what it costs to begin: bytes over bandwidth, operations over rate.
    #[test]
    fn operators_take_the_longer_of_bytes_and_operations() {
        let gpu = Gpu { operator_s: 0.0, half_rate_rows: 0.0, ..Gpu::of_rates(1e9, 1e9, 1e12) };
        let cost = CostModel::new(gpu);
        let check = |seconds: f64, expected: f64| {
            assert!((seconds - expected).abs() < 1e-3 * expected, "{seconds}, not {expected}");
        };
        // 1000 x 1000 in 2 MB: one row reads 2 MB and 4 kB, a thousand rows multiply 2e9 times.
        check(cost.matmul(1, [1000, 1000], 2e6, false), 2.004e-3);
        let fast = CostModel::new(Gpu { bytes_per_s: 1e12, ..gpu });
        check(fast.matmul(10_000, [1000, 1000], 2e6, false), 2e10 / (0.87 * 1e12));
        check(cost.elementwise(5e6), 5e-3);
        let shape = AttentionShape { num_heads: 8, num_kv_heads: 2, head_dim: 64, block_size: 16 };
        let decode = RowLoad { len: 1, context_len: 1000 };
        let expected = 2.0 * 1000.0 * 512.0 / 1e9 + DECODE_S + 2.0 * DECODE_ROW_S;
        check(cost.attention([decode; 2].into_iter(), shape), expected);
        let prompt = RowLoad { len: 1100, context_len: 1100 };
        let flop = 4.0 * 512.0 * 1100.0 * 1101.0 / 2.0;
        check(cost.attention([prompt].into_iter(), shape), flop / (0.5 * ATTENTION_SHARE * 1e12));
        check(cost.link(25e6), 1e-3 + 8e-6);
    }
}

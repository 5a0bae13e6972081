//! What the KV cache's memory would hold with numbers of each type.

use inflight_backend::KvDtype;
use inflight_engine::EngineConfig;
use inflight_model::ModelConfig;
use inflight_server::KvCapacity;

use crate::resolve::bytes_per_block;

/// What a pool of `engine`'s size holds with each of `dtypes`; `used` is its type.
pub(crate) fn kv_capacities(
    engine: &EngineConfig,
    model: &ModelConfig,
    used: KvDtype,
    dtypes: &[KvDtype],
) -> Vec<KvCapacity> {
    let pool_bytes = engine.num_blocks * bytes_per_block(engine, model, used);
    let (terms, len) = (engine.kv_terms(model), engine.max_model_len);
    // Of several layer groups, a long request's token takes its share of what that takes at most.
    let has_groups = !terms.other_windows.as_slice().is_empty();
    let (blocks, tokens) =
        if has_groups { (terms.most_blocks(len), len) } else { (1, engine.block_size) };
    let of = |&dtype: &KvDtype| {
        let block_bytes = bytes_per_block(engine, model, dtype);
        KvCapacity {
            dtype: dtype.to_string(),
            token_bytes: (blocks * block_bytes).div_ceil(tokens),
            num_tokens: terms.num_tokens(pool_bytes / block_bytes, len),
            is_used: dtype == used,
        }
    };
    dtypes.iter().map(of).collect()
}

/// A line for people: the bytes of a token, and what would fit with other types.
pub(crate) fn describe(capacities: &[KvCapacity]) -> String {
    let used = capacities.iter().find(|fit| fit.is_used).map_or(0, |fit| fit.token_bytes);
    let others = capacities.iter().filter(|fit| !fit.is_used);
    let others: Vec<String> =
        others.map(|fit| format!("{} of {}", fit.num_tokens, fit.dtype)).collect();
    format!("{used} bytes a token; would hold {}", others.join(", "))
}

#[cfg(test)]
mod tests {
    use inflight_bench::BuiltInConfig;

    use super::*;

    /// Llama 3.1 8B: 32 layers, 8 KV heads of 128; keys and values.
    #[test]
    fn what_fits_follows_from_the_bytes_of_a_token() {
        let model = BuiltInConfig::Llama31B8.dummy(0).unwrap().config;
        let engine = EngineConfig {
            overlap: true,
            max_num_seqs: 8,
            max_num_batched_tokens: 512,
            max_model_len: 8192,
            block_size: 16,
            num_blocks: 1000,
            memory: Default::default(),
            kv_keep: Default::default(),
            max_outstanding: 8,
        };
        let dtypes = [KvDtype::Bf16, KvDtype::F32, KvDtype::Int8];
        let fits = kv_capacities(&engine, &model, KvDtype::Bf16, &dtypes);
        let bytes: Vec<usize> = fits.iter().map(|fit| fit.token_bytes).collect();
        assert_eq!(bytes, [131_072, 262_144, 2 * 32 * 8 * (128 + 4)]);
        let tokens: Vec<usize> = fits.iter().map(|fit| fit.num_tokens).collect();
        // 1000 blocks of 2 MiB by blocks of 1,081,344 bytes are 1939.4.
        assert_eq!(tokens, [16_000, 8_000, 1939 * 16]);
        let text = describe(&fits);
        assert_eq!(text, "131072 bytes a token; would hold 8000 of f32, 31024 of int8");
        // Half of the layers look back on 512 tokens, which with a row of 512 lie in 65 blocks.
        let windows = (0..32).map(|layer| (layer % 2 == 0).then_some(512)).collect();
        let mixed = ModelConfig { layer_windows: windows, ..model };
        let fits = kv_capacities(&engine, &mixed, KvDtype::Bf16, &dtypes[..1]);
        assert_eq!(fits[0].token_bytes, (512 + 65) * (1 << 20) / 8192);
        assert_eq!(fits[0].num_tokens, 1000 * 8192 / (512 + 65));
    }
}

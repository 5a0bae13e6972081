//! A configuration that cannot work, and a request that cannot fit.

use thiserror::Error;

/// A configuration that the scheduler cannot work with.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum SchedulerError {
    /// A limit that must be positive is zero.
    #[error("{field} must be at least 1")]
    ZeroLimit {
        /// Name of the field in [`SchedulerConfig`](crate::SchedulerConfig).
        field: &'static str,
    },

    /// The token budget has no room for one decode token of every sequence.
    #[error(
        "max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs \
         ({max_num_seqs}), so that every running sequence gets its token"
    )]
    BudgetBelowSequences {
        /// The token budget of one batch.
        max_num_batched_tokens: usize,
        /// The limit on running sequences.
        max_num_seqs: usize,
    },

    /// More sequences than 32-bit state slots can number.
    #[error("max_num_seqs ({max_num_seqs}) must fit 32 bits")]
    TooManySequences {
        /// The limit on running sequences.
        max_num_seqs: usize,
    },

    /// More blocks of host memory than can be numbered.
    #[error("num_swap_blocks ({num_swap_blocks}) must fit 32 bits")]
    SwapSpaceTooLarge {
        /// Number of blocks.
        num_swap_blocks: usize,
    },

    /// More token places than a 32-bit slot mapping can address.
    #[error("num_blocks ({num_blocks}) times block_size ({block_size}) must fit 32 bits")]
    CacheTooLarge {
        /// Number of blocks.
        num_blocks: usize,
        /// Tokens in one block.
        block_size: usize,
    },

    /// Prompts in batches of their own hold up decodes for as long as they take.
    #[error("target_itl needs continuous batching, with prompts in chunks beside the decodes")]
    TargetNeedsChunks,

    /// A ratio that is no number of prompts.
    #[error("waiting_served_ratio ({ratio}) must be a number and at least 0")]
    BadRatio {
        /// What was given.
        ratio: f64,
    },

    /// A sequence that fits the cache would not fit the running ones' total.
    #[error(
        "max_batch_total_tokens ({max_batch_total_tokens}) must be at least {largest}, the tokens \
         of the longest sequence"
    )]
    TotalBelowOne {
        /// The limit on all running sequences' tokens.
        max_batch_total_tokens: usize,
        /// Most tokens of one sequence.
        largest: usize,
    },
}

/// A request that can never run under the configured limits. It alone is at fault.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AdmissionError {
    /// There is no token to start from.
    #[error("prompt is empty: at least one token is needed")]
    EmptyPrompt,

    /// No token is asked for.
    #[error("max_tokens must be at least 1")]
    ZeroMaxTokens,

    /// The prompt leaves no room for a generated token.
    #[error(
        "prompt has {prompt_len} tokens, and at least one must be generated, but the model's \
         context (max_model_len) is {max_model_len} tokens"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_len: usize,
        /// Limit on prompt and generated tokens together.
        max_model_len: usize,
    },

    /// Prompt and generated tokens need more KV cache than there is.
    #[error(
        "prompt ({prompt_len} tokens) and max_tokens ({max_tokens}) need {needed_blocks} KV cache \
         blocks of {block_size} tokens, the whole cache has {num_blocks}"
    )]
    LargerThanCache {
        /// Tokens of the prompt.
        prompt_len: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Blocks that the sequence holds just before its last token.
        needed_blocks: usize,
        /// Blocks of the pool, free or not.
        num_blocks: usize,
        /// Tokens in one block.
        block_size: usize,
    },
}

//! Fields that change nothing, so that leaving them unread is right.
//!
//! Everything else that is not obeyed is refused: silence would be a wrong answer.

/// A field and the values with which it asks for what happens anyway.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Neutral {
    pub(crate) name: &'static str,
    pub(crate) values: Values,
}

/// Values in JSON's notation; `null` is always neutral.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Values {
    All,
    Only(&'static [&'static str]),
}

const fn all(name: &'static str) -> Neutral {
    Neutral { name, values: Values::All }
}

const fn only(name: &'static str, values: &'static [&'static str]) -> Neutral {
    Neutral { name, values: Values::Only(values) }
}

/// Of all endpoints that generate.
pub(crate) const COMMON: &[Neutral] = &[
    // Who asks: OpenAI uses it against abuse.
    all("safety_identifier"),
    // A hint for routing; outputs do not depend on it.
    all("prompt_cache_key"),
    // Every request is served alike.
    only("service_tier", &["\"auto\"", "\"default\""]),
    only("use_beam_search", &["false"]),
    // It holds no distribution's entropy; top-n-sigma, typical and min-p are what there is.
    only("mirostat", &["0"]),
    only("mirostat_mode", &["0"]),
    // There is one way to follow grammars.
    all("guided_decoding_backend"),
    only("guided_whitespace_pattern", &[]),
    only("spaces_between_special_tokens", &["true"]),
];

/// Of completions.
pub(crate) const COMPLETIONS: &[Neutral] = &[
    // Needs a model that fills in the middle.
    only("suffix", &[]),
];

/// Of chat completions.
pub(crate) const CHAT: &[Neutral] = &[
    // Belongs to stored answers, and none is stored.
    all("metadata"),
    only("store", &["false"]),
    only("functions", &["[]"]),
    only("function_call", &["\"none\"", "\"auto\""]),
    only("modalities", &["[\"text\"]"]),
    only("audio", &[]),
    only("prediction", &[]),
    only("verbosity", &["\"medium\""]),
    only("web_search_options", &[]),
    only("echo", &["false"]),
    only("chat_template", &[]),
    only("documents", &["[]"]),
    // The template writes them.
    only("add_special_tokens", &["false"]),
];

/// Of responses.
pub(crate) const RESPONSES: &[Neutral] = &[
    // No response outlives its request.
    only("store", &["false"]),
    only("previous_response_id", &[]),
    only("conversation", &[]),
    only("background", &["false"]),
    only("prompt", &[]),
    only("context_management", &[]),
    only("truncation", &["\"disabled\""]),
    only("max_tool_calls", &[]),
];

/// Of embeddings.
pub(crate) const EMBEDDINGS: &[Neutral] = &[only("truncate_prompt_tokens", &[])];

/// Of batches.
pub(crate) const BATCHES: &[Neutral] = &[only("output_expires_after", &[])];

/// Of Anthropic's messages.
pub(crate) const ANTHROPIC: &[Neutral] = &[
    // Who asks.
    all("metadata"),
    only("service_tier", &["\"auto\"", "\"standard_only\""]),
    only("container", &[]),
    only("mcp_servers", &["[]"]),
    only("context_management", &[]),
    only("output_config", &["{}"]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_hold_valid_json_and_no_name_twice() {
        for table in [COMPLETIONS, CHAT, RESPONSES, ANTHROPIC] {
            let is_openai = table != ANTHROPIC;
            let common = COMMON.iter().filter(|_| is_openai);
            let fields: Vec<_> = common.chain(table).collect();
            for (at, field) in fields.iter().enumerate() {
                assert!(fields[..at].iter().all(|other| other.name != field.name));
                let Values::Only(values) = field.values else { continue };
                for value in values {
                    serde_json::from_str::<serde_json::Value>(value).unwrap();
                }
            }
        }
    }
}

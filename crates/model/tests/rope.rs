//! Rotary tables against the formulas of the papers; see `rope/make_expected.py`.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

use inflight_model::{ModelConfig, RopeConfig, RopeScaling, rotary_table};
use serde_json::{Value, json};

fn config(head_dim: u64, fields: Value) -> ModelConfig {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4 * head_dim,
        "intermediate_size": 64,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 32,
    });
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    ModelConfig::from_json("config.json", &config.to_string()).unwrap()
}

fn check_case(case: &Value, rope: &RopeConfig) {
    let name = case["name"].as_str().unwrap();
    let dim = case["rotary_dim"].as_u64().unwrap() as usize;
    let positions: Vec<usize> = serde_json::from_value(case["positions"].clone()).unwrap();
    let rows: Vec<Vec<f32>> = serde_json::from_value(case["rows"].clone()).unwrap();
    let table = rotary_table(rope, positions.last().unwrap() + 1);
    assert_eq!(table.shape, [positions.last().unwrap() + 1, dim], "{name}");
    for (position, expected) in positions.iter().zip(&rows) {
        let mut row = vec![0.0; dim];
        table.read_row(*position, &mut row);
        for (i, (value, expected)) in row.iter().zip(expected).enumerate() {
            // A frequency, an angle and a cosine in f32 are each off by half a unit in the last
            // place or two, which an angle of `position` radians multiplies.
            let tolerance = if *position <= 1 {
                3e-7 * expected.abs() + 1e-12
            } else {
                2e-7 * (1.0 + *position as f32)
            };
            let difference = (value - expected).abs();
            assert!(
                difference <= tolerance,
                "{name}, position {position}, element {i}: {value} instead of {expected}"
            );
        }
    }
}

#[test]
fn tables_follow_the_formulas_in_both_spellings() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("rope/expected.json")).unwrap();
    assert_eq!(cases.len(), 9);
    for case in &cases {
        let head_dim = case["head_dim"].as_u64().unwrap();
        let parameters = case["rope_parameters"].clone();
        let new = config(head_dim, json!({ "rope_parameters": parameters }));
        check_case(case, &new.rope);

        let mut scaling = parameters.as_object().unwrap().clone();
        let theta = scaling.remove("rope_theta").unwrap();
        let fraction = scaling.remove("partial_rotary_factor");
        let kind = scaling.remove("rope_type").unwrap();
        scaling.insert("type".into(), kind.clone());
        let scaling = if kind == "default" { Value::Null } else { Value::Object(scaling) };
        let old = config(
            head_dim,
            json!({
                "rope_theta": theta,
                "rope_scaling": scaling,
                "partial_rotary_factor": fraction,
            }),
        );
        assert_eq!(old.rope, new.rope, "{}", case["name"]);
    }
}

#[test]
fn divisors_are_another_way_to_write_a_scaling() {
    let rope = |scaling| RopeConfig { theta: 1e4, rotary_dim: 32, interleaved: true, scaling };
    let linear = rotary_table(&rope(RopeScaling::Linear { factor: 4.0 }), 50);
    let divisors = rotary_table(&rope(RopeScaling::Divisors(vec![4.0; 16])), 50);
    assert_eq!(linear.to_f32(), divisors.to_f32());
}

#[test]
fn the_context_of_yarn_is_the_stretched_one() {
    let yarn = json!({
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65_536
    });
    assert_eq!(config(64, json!({ "rope_scaling": yarn })).max_position, 262_144);
    let yarn = json!({ "type": "yarn", "factor": 2.0 });
    assert_eq!(config(64, json!({ "rope_scaling": yarn })).max_position, 262_144);
    let linear = json!({ "type": "linear", "factor": 2.0 });
    assert_eq!(config(64, json!({ "rope_scaling": linear })).max_position, 131_072);
}

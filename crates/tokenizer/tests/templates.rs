//! Chat templates against Python's jinja2 (`data/make_template_refs.py`).

#![allow(clippy::unwrap_used, reason = "a test's helper may fail like the test")]

mod common;

use inflight_tokenizer::{ChatInput, ChatTemplate, TemplateTokens, TokenizerError};
use serde_json::{Map, Value, json};

fn compile(source: &str) -> Result<ChatTemplate, TokenizerError> {
    let tokens = TemplateTokens {
        bos: Some("<s>".to_string()),
        eos: Some("</s>".to_string()),
        ..TemplateTokens::default()
    };
    ChatTemplate::new(source, tokens)
}

fn render(source: &str, messages: &Value) -> Result<String, TokenizerError> {
    let input = ChatInput { messages, tools: None, add_generation_prompt: true, extra: None };
    compile(source)?.render(&input)
}

/// Renders a case of the reference file, whose `extra` holds arguments of the renderer too.
fn render_case(case: &Value) -> Result<String, TokenizerError> {
    let mut extra = case["extra"].as_object().unwrap().clone();
    let tools = extra.remove("tools");
    let add_generation_prompt = extra.remove("add_generation_prompt");
    compile(case["template"].as_str().unwrap())?.render(&ChatInput {
        messages: &case["messages"],
        tools: tools.as_ref(),
        add_generation_prompt: add_generation_prompt.is_none_or(|flag| flag == true),
        extra: Some(&extra),
    })
}

#[test]
fn every_case_renders_as_jinja2_does() {
    let refs = common::data("template_refs.json");
    for case in refs["cases"].as_array().unwrap() {
        let name = &case["name"];
        match (render_case(case), case["refused"].as_str()) {
            (Ok(text), None) => assert_eq!(text, case["rendered"].as_str().unwrap(), "{name}"),
            (Err(TokenizerError::TemplateRefused(message)), Some(expected)) => {
                assert_eq!(message, expected, "{name}");
            }
            (outcome, _) => panic!("{name}: {outcome:?}"),
        }
    }
}

#[test]
fn a_refusal_reaches_the_user_in_the_templates_words() {
    let source = "{% macro check() %}{{ raise_exception('No system role, please') }}{% endmacro %}\
                  {{ check() }}";
    let error = render(source, &json!([])).unwrap_err();
    assert!(matches!(&error, TokenizerError::TemplateRefused(m) if m == "No system role, please"));
    assert!(error.to_string().ends_with("No system role, please"));
}

#[test]
fn malformed_templates_name_the_line() {
    let message = compile("ok\n{% if x %}\n{% endfor %}").unwrap_err().to_string();
    assert!(message.contains("malformed") && message.contains(":3"), "{message}");
}

#[test]
fn templates_that_fail_say_why() {
    let check = |source: &str, expected: &str| {
        let error = render(source, &json!([{"role": "user"}])).unwrap_err();
        assert!(matches!(error, TokenizerError::TemplateFailed(_)));
        assert!(error.to_string().contains(expected), "{error}");
    };
    check("{{ messages[0].content.strip() }}", "undefined");
    check("{{ nothing() }}", "nothing");
    check("{{ messages | tojson(indent=1000000) }}", "indent");
    check("{{ messages | tojson(cls=1) }}", "cls");
    check("{{ strftime_now('%!') }}", "strftime");
}

#[test]
fn templates_cannot_run_or_grow_forever() {
    let loops =
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}";
    let grows = "{% set ns = namespace(x='x') %}{% for a in range(64) %}\
                 {% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    let nests = "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}";
    let repeats = "{{ 'x' * 99999999999 }}";
    for source in [loops, grows, nests, repeats] {
        let error = render(source, &json!([])).unwrap_err();
        assert!(matches!(error, TokenizerError::TemplateFailed(_)), "{source}: {error}");
    }
}

#[test]
fn a_long_chat_fits_the_step_limit() {
    let message = json!({"role": "user", "content": "word ".repeat(200)});
    let messages = Value::Array(vec![message; 5000]);
    let refs = common::data("template_refs.json");
    let qwen =
        refs["cases"].as_array().unwrap().iter().find(|case| case["name"] == "qwen").unwrap();
    let text = render(qwen["template"].as_str().unwrap(), &messages).unwrap();
    assert_eq!(text.matches("<|im_start|>").count(), 5001);
}

#[test]
fn further_variables_overrule_all_others() {
    let mut extra = Map::new();
    extra.insert("bos_token".to_string(), json!("<other>"));
    extra.insert("enable_thinking".to_string(), json!(true));
    let template =
        compile("{{ bos_token }}{{ eos_token }}{{ enable_thinking }}{{ tools }}").unwrap();
    let messages = json!([]);
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: false,
        extra: Some(&extra),
    };
    assert_eq!(template.render(&input).unwrap(), "<other></s>TrueNone");
}

#[test]
fn the_clock_is_read() {
    let year = render("{{ strftime_now('%Y') }}", &json!([])).unwrap();
    assert!(year.parse::<u32>().is_ok_and(|year| year >= 2024), "{year}");
}

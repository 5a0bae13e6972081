//! Which outputs each kind of constraint accepts.

mod support;

use inflight_grammar::{Constraint, Thinking, thinking::after_thinking, tools};
use serde_json::json;
use support::{CALL, EOS, TOKENIZER, allowed, check, compile, follow};

fn schema(schema: serde_json::Value) -> Constraint {
    Constraint::JsonSchema(schema)
}

fn gbnf(text: &str) -> Constraint {
    Constraint::Gbnf(text.to_owned())
}

#[test]
fn json() {
    check(
        &Constraint::JsonObject,
        &[
            "{}",
            r#"{"a": [1, -2.5e3, true, null, "x\n"]}"#,
            "{\n  \"a\": {}\n}",
            r#"{"a":1,"b":2}"#,
        ],
        &["", "[]", "1", r#"{"a": }"#, r#"{"a": 01}"#, "{} ", "{}}", r#"{"a":   1}"#],
    );
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "minLength": 2, "maxLength": 3 },
            "age": { "type": "integer", "minimum": 0, "maximum": 120 },
            "tags": { "type": "array", "items": { "enum": ["a", "b"] }, "maxItems": 2 },
        },
        "required": ["name"],
        "additionalProperties": false,
    });
    check(
        &schema(person),
        &[r#"{"name": "Al"}"#, r#"{"name":"Ada","age":120,"tags":["a","b"]}"#],
        &[
            "{}",
            r#"{"name": "A"}"#,
            r#"{"name": "Adam"}"#,
            r#"{"name": "Al", "age": 121}"#,
            r#"{"name": "Al", "age": 1.5}"#,
            r#"{"name": "Al", "tags": ["a", "b", "a"]}"#,
            r#"{"name": "Al", "tags": ["c"]}"#,
            r#"{"name": "Al", "other": 1}"#,
        ],
    );
    let tree = json!({
        "$defs": { "node": {
            "type": "object",
            "properties": { "next": { "anyOf": [{ "$ref": "#/$defs/node" }, { "type": "null" }] } },
            "required": ["next"],
            "additionalProperties": false,
        } },
        "$ref": "#/$defs/node",
    });
    check(&schema(tree), &[r#"{"next":{"next":null}}"#], &["{}", r#"{"next":{}}"#]);
    check(&schema(json!(true)), &["1", "[]", "\"a\""], &["a", ""]);
}

#[test]
fn a_schema_cannot_loosen_itself() {
    let schema = schema(json!({
        "x-guidance": { "lenient": true },
        "type": "array",
        "uniqueItems": true,
    }));
    assert!(compile(&schema).unwrap_err().contains("uniqueItems"));
}

#[test]
fn regular_expressions_match_the_whole_output() {
    let regex = |text: &str| Constraint::Regex(text.to_owned());
    check(&regex("[a-c]{2,3}x?"), &["ab", "abcx"], &["a", "abcd", " ab", "abcab"]);
    check(&regex(r"\d+/\d+"), &["1/2", "10/20"], &["1", "/"]);
    check(&regex("ab|cd"), &["ab", "cd"], &["abd", "abcd"]);
    check(&regex("é+"), &["é", "éé"], &["e"]);
}

#[test]
fn choices() {
    let choice = |texts: &[&str]| Constraint::Choice(texts.iter().map(|t| (*t).into()).collect());
    check(
        &choice(&["yes", "no", "not \"so\"\n"]),
        &["yes", "no", "not \"so\"\n"],
        &["", "n", "nos"],
    );
    check(&choice(&["a", "ab"]), &["a", "ab"], &["b", "aab"]);
    check(&choice(&[".*"]), &[".*"], &["a"]);
}

#[test]
fn lark() {
    let lark = "start: \"a\" other* \"z\"\nother: \"(\" other \")\" | /[0-9]/\n";
    check(
        &Constraint::Grammar(lark.to_owned()),
        &["az", "a(1)2z", "a((3))z"],
        &["a", "a(z", "a()z"],
    );
}

/// The expected answers follow from llama.cpp's description of GBNF.
#[test]
fn gbnf_without_recursion_is_matched_as_one() {
    let text = "# a greeting\nroot ::= word+ end\nword ::= [a-z]\nend ::= \"abc\" | \"!\"\n";
    check(&gbnf(text), &["xabc", "abcabc", "a!", "abc!"], &["abc", "!", "xab", "A!"]);
    check(&gbnf("root ::= [^a-c]{2} \"\\\"\" .?"), &["xy\"", "xy\"\n"], &["xa\"", "xy\"zz"]);
    check(&gbnf("root ::= (\"a\" | \"b\")? [x-]"), &["ax", "-"], &["ab", ""]);
    check(&Constraint::Grammar("root ::= \"a\"*".to_owned()), &["", "aaa"], &["b"]);
}

#[test]
fn gbnf_with_recursion() {
    let json = r#"
        root   ::= object
        value  ::= object | array | string | number | ("true" | "false" | "null") ws
        object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
        array  ::= "[" ws ( value ("," ws value)* )? "]" ws
        string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
        number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
        ws ::= | " " | "\n" [ \t]{0,20}
    "#;
    check(
        &gbnf(json),
        &["{}", r#"{"a": [1, {"b": null}], "c": "\u00e9"}"#, "{ \"a\":true}\n  "],
        &["[]", "{", r#"{"a"}"#, r#"{"a": tru}"#, "{}{}"],
    );
    let arithmetic = "root ::= expr\nexpr ::= term ([-+*/] term)*\n\
        term ::= num | \"(\" expr \")\"\nnum ::= [0-9]+\n";
    check(&gbnf(arithmetic), &["1", "1+2*(3-4)", "((1))"], &["", "1+", "(1", "1)"]);
}

#[test]
fn what_cannot_be_enforced_is_named() {
    let refused = |constraint: &Constraint, expected: &str| {
        let error = compile(constraint).unwrap_err();
        assert!(error.contains(expected), "{constraint:?}: {error}");
    };
    refused(&schema(json!({ "type": "array", "uniqueItems": true })), "uniqueItems");
    refused(&schema(json!({ "if": { "type": "string" }, "then": {} })), "if");
    refused(&schema(json!({ "type": "string", "format": "no-such" })), "format");
    refused(&schema(json!({ "type": "nothing" })), "nothing");
    refused(&schema(json!({ "$ref": "https://example.org/schema" })), "$ref");
    refused(&schema(json!({ "type": "string", "pattern": "(?=a)b" })), "look-around");
    refused(&schema(json!([1])), "must be an object");
    refused(&schema(json!(false)), "must be an object");
    refused(&Constraint::Regex("a(".to_owned()), "unclosed group");
    refused(&Constraint::Grammar("start: other".to_owned()), "other");
    refused(&Constraint::Grammar(String::new()), "start");
    refused(&gbnf("root ::= other"), "other");
    refused(&gbnf("main ::= \"a\""), "root");
}

#[test]
fn thoughts_come_before() {
    let answer = compile(&Constraint::Choice(vec!["abc".to_owned()])).unwrap();
    let thinking = Thinking { start: Some(257), end: 258, is_open: false, budget: None };
    let grammar = after_thinking(Some(answer), thinking);
    assert_eq!(follow(&grammar, &[262]), Ok(()));
    assert_eq!(follow(&grammar, &[257, 1, 2, 262, 258, 97, 98, 99]), Ok(()));
    assert_eq!(follow(&grammar, &[257, 258, 1]), Err(2));
    assert_eq!(allowed(&mut *grammar.0.start()), Some(vec![97, 257, 262]));
}

#[test]
fn calls_that_may_be_made_are_free_until_their_mark() {
    let number = json!({
        "type": "object", "properties": { "a": { "type": "integer" } },
        "required": ["a"], "additionalProperties": false,
    });
    let tools = [tools::Tool { name: "add".to_owned(), parameters: number }];
    let good = r#"{"name": "add", "arguments": {"a": 12}}"#;
    let bad = r#"{"name": "add", "arguments": {"a": "b"}}"#;
    let format = |before: &str, start: &str, end: &str, after: &str| tools::CallFormat {
        before: before.to_owned(),
        call_start: start.to_owned(),
        call_end: end.to_owned(),
        between: ", ".to_owned(),
        after: after.to_owned(),
        name_field: "name".to_owned(),
        arguments_field: "arguments".to_owned(),
    };
    let spell = |text: &str| -> Vec<u32> {
        let pieces = text.split("<|tool|>").map(|piece| piece.bytes().map(u32::from).collect());
        pieces.collect::<Vec<Vec<u32>>>().join(&CALL)
    };
    let check = |format: &tools::CallFormat, is_parallel, good: &[String], bad: &[String]| {
        let calls = tools::optional_tool_calls(&tools, format, is_parallel, &TOKENIZER).unwrap();
        let grammar = compile(&calls).unwrap_or_else(|error| panic!("{calls:?}: {error}"));
        for text in good {
            assert_eq!(follow(&grammar, &spell(text)), Ok(()), "{text}");
        }
        for text in bad {
            assert!(follow(&grammar, &spell(text)).is_err(), "{text}");
        }
    };
    for mark in ["<call>", "<|tool|>"] {
        let call = |json: &str| format!("{mark}\n{json}\n</call>");
        let texts = [
            String::new(),
            "{\"a\": 1} and < or <cal".to_owned(),
            call(good),
            format!("I add.\n{}", call(good)),
            format!("{}\n{}\nDone.", call(good), call(good)),
        ];
        let wrong = [
            call(bad),
            format!("Hm {}", call(bad)),
            format!("{} {}", call(good), call(bad)),
            format!("{mark}\n{{}}"),
        ];
        let format = format("", &format!("{mark}\n"), "\n</call>", "");
        check(&format, true, &texts, &wrong);
        check(&format, false, &texts[..4], &wrong[..2]);
    }
    let list = |json: &str| format!("<|tool|>[{json}]");
    check(
        &format("<|tool|>[", "", "", "]"),
        true,
        &["Hi".to_owned(), list(good), format!("So: {}", list(&format!("{good}, {good}")))],
        &[list(bad), format!("So: {}", list(bad))],
    );
    check(
        &format("", "", "", ""),
        true,
        &["Hi {".to_owned(), String::new(), good.to_owned(), format!("{good}, {good}")],
        &[bad.to_owned(), "{\"a\": 1}".to_owned(), "  {}".to_owned()],
    );
}

#[test]
fn tool_calls() {
    let tool = |name: &str, parameters| tools::Tool { name: name.to_owned(), parameters };
    let tools = [
        tool(
            "add",
            json!({
                "type": "object",
                "properties": { "a": { "$ref": "#/$defs/number" } },
                "required": ["a"],
                "additionalProperties": false,
                "$defs": { "number": { "type": "integer" } },
            }),
        ),
        tool("now", json!({ "type": "object", "additionalProperties": false })),
    ];
    let format = tools::CallFormat {
        call_start: "<|tool|>\n".to_owned(),
        call_end: "\n</call>".to_owned(),
        between: "\n".to_owned(),
        name_field: "name".to_owned(),
        arguments_field: "arguments".to_owned(),
        ..tools::CallFormat::default()
    };
    let spell = |calls: &[&str]| -> Vec<u32> {
        let call = |call: &&str| {
            [vec![CALL], format!("\n{call}\n</call>").bytes().map(u32::from).collect()].concat()
        };
        calls.iter().map(call).collect::<Vec<_>>().join(&u32::from(b'\n'))
    };
    let add = r#"{"name": "add", "arguments": {"a": 12}}"#;
    let now = r#"{"name": "now", "arguments": {}}"#;
    let grammar = |tools: &[tools::Tool], is_parallel| {
        compile(&tools::tool_calls(tools, &format, is_parallel, &TOKENIZER).unwrap()).unwrap()
    };
    let one = grammar(&tools, false);
    assert_eq!(follow(&one, &spell(&[add])), Ok(()));
    assert_eq!(follow(&one, &spell(&[now])), Ok(()));
    assert!(follow(&one, &spell(&[add, now])).is_err());
    assert_eq!(follow(&grammar(&tools, true), &spell(&[add, now, add])), Ok(()));
    let bad = r#"{"name": "add", "arguments": {"a": 1.5}}"#;
    assert!(follow(&one, &spell(&[bad])).is_err());
    assert!(follow(&grammar(&tools[..1], false), &spell(&[now])).is_err());
    assert_eq!(follow(&one, &[EOS]), Err(0));
}

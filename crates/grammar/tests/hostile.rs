//! Constraints that were made to cost: each is compiled or refused soon, on a small stack.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

mod support;

use std::{sync::mpsc, thread, time::Duration};

use inflight_grammar::Constraint;
use serde_json::{Value, json};
use support::compile;

/// Far more than any of them takes; a test's way to say "bounded".
const LIMIT: Duration = Duration::from_secs(60);
/// What threads have that follow grammars.
const STACK_BYTES: usize = 2 << 20;

fn ends(name: &str, constraint: Constraint) {
    let (sender, result) = mpsc::channel();
    let thread = thread::Builder::new().stack_size(STACK_BYTES);
    thread
        .spawn(move || {
            if let Ok(grammar) = compile(&constraint) {
                let mut matcher = grammar.0.start();
                let mut mask = vec![0; support::VOCAB_SIZE.div_ceil(32)];
                for _ in 0..20 {
                    // Whatever it says, it says it.
                    if matcher.allowed(&mut mask).is_err() {
                        break;
                    }
                    let first = mask.iter().position(|word| *word != 0).unwrap_or(0);
                    let token = first as u32 * 32 + mask[first].trailing_zeros();
                    mask.fill(0);
                    if matcher.advance(token).is_err() {
                        break;
                    }
                }
            }
            sender.send(()).unwrap();
        })
        .unwrap();
    let ended = result.recv_timeout(LIMIT);
    assert!(ended.is_ok(), "{name}: {ended:?}");
}

fn chain(num: usize, rule: impl Fn(usize) -> String) -> String {
    (0..num).map(rule).collect::<Vec<_>>().join("\n")
}

#[test]
fn regular_expressions() {
    let regex = |name, text: String| ends(name, Constraint::Regex(text));
    regex("repeated repeats", "((a{1,1000}){1,1000}){1,1000}".to_owned());
    regex("alternatives of repeats", "(a|aa|aaa){1,5000}b(c|cc){3,4000}".to_owned());
    regex("exponential states", format!("(a|b)*a{}", "(a|b)".repeat(2000)));
    regex("many parentheses", format!("{}a{}", "(".repeat(50_000), ")".repeat(50_000)));
    regex("many stars", format!("a{}", "*".repeat(100_000)));
    regex("many alternatives", vec!["abc"; 100_000].join("|"));
    regex("long", "ab".repeat(200_000));
    regex("unicode", r"(\p{L}{1,500}\p{N}){100}".to_owned());
}

#[test]
fn grammars() {
    let grammar = |name, text: String| ends(name, Constraint::Grammar(text));
    let doubling = |i| format!("T{i}: T{} T{}", i + 1, i + 1);
    grammar("doubled terminals", format!("start: T0\n{}\nT60: \"a\"", chain(60, doubling)));
    let doubling = |i| format!("r{i}: r{} r{}", i + 1, i + 1);
    grammar("doubled rules", format!("start: r0\n{}\nr60: \"a\"", chain(60, doubling)));
    let next = |i| format!("T{i}: T{}", i + 1);
    grammar("a chain of terminals", format!("start: T0\n{}\nT4000: \"a\"", chain(4000, next)));
    let next = |i| format!("r{i}: \"a\" r{}", i + 1);
    grammar("a chain of rules", format!("start: r0\n{}\nr4000: \"a\"", chain(4000, next)));
    grammar("parentheses", format!("start: {}\"a\"{}", "(".repeat(4000), ")".repeat(4000)));
    let deep = |i| format!("T{i}: {}T{}{}", "(".repeat(50), i + 1, ")".repeat(50));
    grammar("a deep chain", format!("start: T0\n{}\nT4000: \"a\"", chain(4000, deep)));
    let deep = |i| format!("r{i}: {}r{}{}", "(".repeat(50), i + 1, ")+".repeat(50));
    grammar("a deep chain of rules", format!("start: r0\n{}\nr2000: \"a\"", chain(2000, deep)));
    grammar("itself", "start: start | start start | \"\" | \"a\"".to_owned());
    grammar("left and right", "start: start \"a\" start | \"a\"".to_owned());
    grammar("nothing", "start: start".to_owned());
    let next = |i| format!("r{i} ::= r{}", i + 1);
    let rules = format!("root ::= r0\n{}\nr4000 ::= \"a\"", chain(4000, next));
    ends("a chain in GBNF", Constraint::Gbnf(rules));
    let doubling = |i| format!("r{i} ::= r{} r{}", i + 1, i + 1);
    let rules = format!("root ::= r0\n{}\nr60 ::= \"a\"", chain(60, doubling));
    ends("doubled in GBNF", Constraint::Gbnf(rules));
    ends("repeats in GBNF", Constraint::Gbnf("root ::= ((.{2000}){2000}){2000}".to_owned()));
}

#[test]
fn schemas() {
    let schema = |name, schema: Value| ends(name, Constraint::JsonSchema(schema));
    let one = |i: usize| {
        let name = format!("p{i}");
        json!({ "type": "object", "properties": { name: { "type": "string" } } })
    };
    let all: Vec<Value> = (0..300).map(one).collect();
    schema("allOf of many", json!({ "allOf": all }));
    let pairs: Vec<Value> = (0..12).map(|i| json!({ "anyOf": [one(i), one(i + 100)] })).collect();
    schema("allOf of anyOf", json!({ "allOf": pairs }));
    schema("itself", json!({ "$ref": "#" }));
    schema("itself in allOf", json!({ "allOf": [{ "$ref": "#" }, { "type": "object" }] }));
    let next = |i: usize| (format!("d{i}"), json!({ "$ref": format!("#/$defs/d{}", i + 1) }));
    let mut defs: serde_json::Map<String, Value> = (0..4000).map(next).collect();
    defs.insert("d4000".to_owned(), json!({ "type": "string" }));
    schema("a chain of references", json!({ "$ref": "#/$defs/d0", "$defs": defs }));
    let properties: serde_json::Map<String, Value> =
        (0..2000).map(|i| (format!("p{i}"), json!({ "type": "integer" }))).collect();
    schema("many optional properties", json!({ "type": "object", "properties": properties }));
    schema("large bounds", json!({ "type": "array", "minItems": 100_000, "maxItems": 1_000_000 }));
    schema("long strings", json!({ "type": "string", "minLength": 1_000_000 }));
    schema(
        "a costly pattern",
        json!({ "type": "string", "pattern": "^((a{1,900}){1,900}b){9,900}$" }),
    );
    schema("a large multiple", json!({ "type": "integer", "multipleOf": 9973 }));
    let values: Vec<String> = (0..20_000).map(|i| format!("value {i}")).collect();
    schema("a large enum", json!({ "enum": values }));
}

//! CUDA C++ as a C++ compiler for the host takes it: inline PTX becomes calls of functions, shared
//! variables become references into the emulator's shared memory. Lines keep their numbers.

use std::{collections::HashSet, fmt::Write as _};

/// What stands between a kernel's type and its name: how it is launched.
pub(crate) fn head<'a>(text: &'a str, kernel: &str) -> &'a str {
    let (before, _) = text.split_once(&format!("{kernel}(const ")).expect("a kernel of parameters");
    let (_, head) = before.rsplit_once("KERNEL void").expect("a kernel");
    head.trim()
}

/// A source with the headers it includes, by `read`, translated.
pub(crate) fn translate(file: &str, text: &str, read: &dyn Fn(&str) -> String) -> String {
    let mut included = HashSet::new();
    let mut all = String::new();
    add_file(file, text, read, &mut included, &mut all);
    all
}

fn add_file(
    file: &str,
    text: &str,
    read: &dyn Fn(&str) -> String,
    included: &mut HashSet<String>,
    all: &mut String,
) {
    writeln!(all, "#line 1 \"{file}\"").unwrap();
    for (number, line) in shared_variables(&inline_ptx(text)).lines().enumerate() {
        let name = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        match name {
            Some(name) if included.insert(name.to_owned()) => {
                add_file(name, &read(name), read, included, all);
                writeln!(all, "#line {} \"{file}\"", number + 2).unwrap();
            }
            // `#pragma once` is for files, which these are no longer.
            Some(_) => all.push('\n'),
            None if line == "#pragma once" => all.push('\n'),
            None => writeln!(all, "{line}").unwrap(),
        }
    }
}

/// Replaces what `find` finds in `text` from each place on where `word` is: its replacement and
/// its length.
fn replace_at(text: &str, word: &str, find: impl Fn(&str) -> Option<(String, usize)>) -> String {
    let mut result = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let is_word = !rest[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let (new, len) = is_word
            .then(|| find(&rest[at..]))
            .flatten()
            .unwrap_or_else(|| (word.to_owned(), word.len()));
        result += &rest[..at];
        result += &new;
        let replaced = &rest[at..at + len];
        let lines = replaced.matches('\n').count() - new.matches('\n').count();
        // A macro goes on over lines.
        result += &(if replaced.contains("\\\n") { "\\\n" } else { "\n" }).repeat(lines);
        rest = &rest[at + len..];
    }
    result + rest
}

// ---- shared variables ----

/// `extern __shared__ T name[];` and `__shared__ T name[3], other;`, all with `__align__(n)` or
/// without.
fn shared_variables(text: &str) -> String {
    let text = replace_at(text, "extern __shared__", |found| {
        let (declaration, _) = found.split_once(';')?;
        let name = declaration.strip_suffix("[]")?.rsplit(' ').next()?;
        let at = "emulator::shared_memory + emulator::DYNAMIC_AT";
        Some((format!("unsigned char* {name} = {at};"), declaration.len() + 1))
    });
    replace_at(&text, "__shared__", |found| {
        let (declaration, _) = found.split_once(';')?;
        let declared = declaration.strip_prefix("__shared__")?;
        let mut names = declared.split(',');
        let (kind, first) = kind_and_name(names.next()?);
        let variables = std::iter::once(first).chain(names.map(str::trim)).map(|variable| {
            let name_len = variable.find('[').unwrap_or(variable.len());
            let (name, dims) = variable.split_at(name_len);
            // A type of its own, so that every instance of a template has its own variable.
            format!(
                "struct shared_{name} {{ {kind} it{dims}; }}; \
                 auto& {name} = emulator::declared<shared_{name}>().it;"
            )
        });
        Some((variables.collect::<Vec<_>>().join(" "), declaration.len() + 1))
    })
}

/// `__align__(16) float x[A / B]` in two, before the name.
fn kind_and_name(declared: &str) -> (&str, &str) {
    let declared = declared.trim();
    let end = declared.find('[').unwrap_or(declared.len());
    let start = declared[..end].rfind(' ').map_or(0, |at| at + 1);
    (declared[..start].trim(), &declared[start..])
}

// ---- inline PTX ----

/// `asm [volatile]("text" : "=r"(to) : "r"(from) : "memory");` as calls of `ptx_…`.
fn inline_ptx(text: &str) -> String {
    replace_at(text, "asm", |found| {
        let after = found["asm".len()..].trim_start();
        let after = after.strip_prefix("volatile").unwrap_or(after).trim_start();
        let inside = parenthesised(after)?;
        let mut parts = split(inside, ':').into_iter();
        let template: String = parts.next()?.split('"').skip(1).step_by(2).collect();
        let operands: Vec<&str> = parts.flat_map(|part| split(part, ',')).collect();
        let operands: Vec<&str> = operands.into_iter().filter_map(operand).collect();
        let len = found.len() - after.len() + inside.len() + "();".len();
        Some((calls(&template.replace("\\n", " "), &operands), len))
    })
}

/// What is between a leading parenthesis and its partner.
fn parenthesised(text: &str) -> Option<&str> {
    let inside = text.strip_prefix('(')?;
    let (mut depth, mut in_string) = (1, false);
    for (at, c) in inside.char_indices() {
        match c {
            '"' => in_string = !in_string,
            '(' if !in_string => depth += 1,
            ')' if !in_string => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&inside[..at]);
        }
    }
    None
}

/// Splits at a character outside of parentheses, brackets and strings.
fn split(text: &str, at: char) -> Vec<&str> {
    let (mut depth, mut in_string, mut start, mut parts) = (0, false, 0, Vec::new());
    for (index, c) in text.char_indices() {
        if c == at && depth == 0 && !in_string {
            parts.push(&text[start..index]);
            start = index + 1;
        }
        match c {
            '"' => in_string = !in_string,
            '(' | '[' | '{' if !in_string => depth += 1,
            ')' | ']' | '}' if !in_string => depth -= 1,
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

/// The expression of `"=r"(expression)`; none of a clobber.
fn operand(text: &str) -> Option<&str> {
    let (_, after) = text.trim().strip_prefix('"')?.split_once('"')?;
    parenthesised(after.trim_start())
}

/// Instructions as calls, in a scope of their own for their registers.
fn calls(template: &str, operands: &[&str]) -> String {
    let body = template.trim();
    let body = body.strip_prefix('{').and_then(|body| body.strip_suffix('}')).unwrap_or(body);
    if let Some((_, again)) = body.split_once("_%=:") {
        return format!("{{ {} }}", call_of_loop(again, operands));
    }
    if let Some(at) = body.find("wgmma.mma_async") {
        return format!("{{ {} }}", product(&body[at..], operands));
    }
    let statements = body.split(';').map(str::trim).filter(|statement| !statement.is_empty());
    let calls: Vec<String> = statements.map(|statement| call(statement, operands)).collect();
    format!("{{ {} }}", calls.join(" "))
}

/// An instruction that is repeated until the predicate that it makes holds, as one call.
fn call_of_loop(statements: &str, operands: &[&str]) -> String {
    let (statement, _) = statements.split_once(';').expect("instructions end");
    let (name, arguments) = statement.trim().split_once(' ').expect("a predicate is asked for");
    let (_, arguments) = arguments.split_once(',').expect("and something besides");
    call(&format!("{name} {arguments}"), operands)
}

/// A product of a warpgroup. Macros list its sums, which are `d`, and the names of operands: here
/// these are in their order, and then the numbers of the text.
fn product(body: &str, operands: &[&str]) -> String {
    let (statement, _) = body.split_once(';').expect("instructions end");
    let (name, arguments) = statement.split_once(' ').expect("it has operands");
    let numbers = arguments.split(',').map(str::trim).filter(|text| text.parse::<u32>().is_ok());
    let all: Vec<&str> = ["d"].into_iter().chain(operands.iter().copied()).chain(numbers).collect();
    let (_, types) = name.split_once(".m64n").expect("64 rows, and any number of columns");
    format!("{}({});", function(&format!("wgmma.{types}")), all.join(", "))
}

fn call(statement: &str, operands: &[&str]) -> String {
    let (name, arguments) = statement.split_once(char::is_whitespace).unwrap_or((statement, ""));
    if name == ".reg" {
        let (kind, names) = arguments.split_once(' ').expect("a register has a type");
        let names: Vec<String> = names.split(',').map(|name| register(name.trim())).collect();
        let bits = kind.strip_prefix(".b").expect("registers of bits");
        return format!("uint{bits}_t {};", names.join(", "));
    }
    let arguments = arguments.split(',').map(|text| text.trim_matches([' ', '{', '}', '[', ']']));
    // `_` is a result that nobody wants.
    let arguments = arguments.filter(|argument| !["", "_"].contains(argument)).map(|argument| {
        let is_register = argument.starts_with(|c: char| c.is_alphabetic());
        match argument.strip_prefix('%') {
            Some(number) => match number.parse::<usize>() {
                Ok(number) => operands[number].to_owned(),
                Err(_) => panic!("`{argument}` of `{statement}` is not emulated"),
            },
            None if is_register => register(argument),
            None => argument.to_owned(),
        }
    });
    format!("{}({});", function(name), arguments.collect::<Vec<_>>().join(", "))
}

fn function(instruction: &str) -> String {
    format!("ptx_{}", instruction.replace(|c: char| !c.is_alphanumeric(), "_"))
}

fn register(name: &str) -> String {
    format!("ptx_register_{name}")
}

#[test]
fn translations() {
    let check = |text: &str, expected: &str| {
        let found = translate("a.cu", text, &|_| unreachable!());
        assert_eq!(found, format!("#line 1 \"a.cu\"\n{expected}\n"));
    };
    check("let_asm(x);", "let_asm(x);");
    check(
        "asm volatile(\"a.b::c %0, [%1], 16;\" ::\"r\"(f(x, y)),\n \"n\"(N)\n : \"memory\");",
        "{ ptx_a_b__c(f(x, y), N, 16); }\n",
    );
    check("asm(\"wait;\" ::: \"memory\"); next();", "{ ptx_wait(); } next();");
    check(
        "asm(\"{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt %0, low; }\" : \"=f\"(x[0]) \
         : \"r\"(low));",
        "{ uint16_t ptx_register_low, ptx_register_high; \
         ptx_mov_b32(ptx_register_low, ptx_register_high, low); ptx_cvt(x[0], ptx_register_low); }",
    );
    check(
        "asm(\"{ .reg .pred p; AGAIN_%=: try.b64 p, [%0], %1; @!p bra AGAIN_%=; }\" :: \"r\"(a), \
         \"r\"(b));",
        "{ ptx_try_b64(a, b); }",
    );
    check(
        "#define M(N) asm(\"{ setp.ne p, \" C \", 0; \" \\\n \"wgmma.mma_async.m64n\" #N \"k16 {\" \
         D_##N \"}, \" A \", \" B \", p, 1, 0; }\" : D(0) \\\n : \"l\"(a), \"l\"(b)); end",
        "#define M(N) { ptx_wgmma_k16(d, a, b, 1, 0); }\\\n\\\n end",
    );
    check(
        "__shared__ u32 a[N / 2], b;",
        "struct shared_a { u32 it[N / 2]; }; auto& a = \
           emulator::declared<shared_a>().it; struct shared_b { u32 it; }; auto& b = \
           emulator::declared<shared_b>().it;",
    );
}

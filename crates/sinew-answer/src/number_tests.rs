use super::*;

fn shown(answer: &str) -> Option<String> {
    number(answer).map(|n| n.value.to_string())
}

#[test]
fn every_pattern_is_one() {
    let all = [
        &CLAUSE,
        &AT_ONCE,
        &BOLD,
        &ASIDE,
        &RUN,
        &SPACED,
        &SIGN,
        &LABEL,
        &PLAIN,
        &THOUSANDS,
        &INDIAN,
        &DOTTED,
        &COMMA,
        &DOT_OR_GROUP,
        &UNDERSCORED,
        &EXPONENT,
        &TEN,
        &POWER,
        &FRACTION,
        &MIXED,
    ];
    assert!(all.iter().all(|p| p.get().is_some()));
}

#[test]
fn numbers_are_read_in_all_notations() {
    for (text, expected) in [
        ("The answer is 42.", "42"),
        ("1 + 2 = 3", "3"),
        ("It costs $1,234.50", "2469/2"),
        ("-7", "-7"),
        ("−7", "-7"),
        ("about 1.5e3", "1500"),
        ("between 3-5", "5"),
        ("1{,}234", "1234"),
        ("1\u{2009}234\u{2009}567", "1234567"),
        (r"$1\,234\,567$", "1234567"),
        ("1.234.567,5", "2469135/2"),
        ("12,34,567", "1234567"),
        ("４２", "42"),
        ("٤٢", "42"),
        ("४२", "42"),
        ("2 2/3", "8/3"),
        (r"\boxed{2\frac{2}{3}}", "8/3"),
        ("3½", "7/2"),
        ("2^{10}", "1024"),
        ("1.2 × 10^5", "120000"),
        (r"$6.02 \times 10^{23}$", "602000000000000000000000"),
        ("3万", "30000"),
        ("1億2000万円", "120000000"),
        ("四十二", "42"),
        ("The area is 5 m^2", "5"),
        ("It is 42 (rounded from 41.7).", "42"),
        ("**42** is what is left of 50", "42"),
        ("The answer is 42. It took 3 steps.", "42"),
        ("Answer: 3 + 4 = 7", "7"),
        ("1. Add.\n2. Done: 12", "12"),
        ("a\n#### 18", "18"),
        ("H2O: 18", "18"),
    ] {
        assert_eq!(shown(text).as_deref(), Some(expected), "{text}");
    }
    for none in [
        "none",
        "",
        r"\boxed{2\sqrt{3}}",
        r"\boxed{x}",
        "<answer></answer>",
    ] {
        assert_eq!(shown(none), None, "{none}");
    }
}

#[test]
fn whole_numbers_are_compared_exactly() {
    let is = |given: &str, expected: &str, tolerance| {
        let expected = expected_number(&Value::from(expected)).unwrap();
        compare(&number(given).unwrap(), &expected, tolerance)
    };
    assert_eq!(is("1234568", "1234567", None), Comparison::Wrong);
    assert_eq!(is("1234568", "1234567", Some(1e-6)), Comparison::Right);
    assert_eq!(
        is("18446744073709551617", "18446744073709551616", None),
        Comparison::Wrong
    );
    assert_eq!(is("0.3333333", "1/3", None), Comparison::Right);
    assert_eq!(is("50%", "0.5", None), Comparison::Right);
    assert_eq!(is("50%", "50", None), Comparison::Right);
    assert_eq!(is("1.234", "1234", None), Comparison::Unclear);
    assert_eq!(is("1.234", "1235", None), Comparison::Wrong);
    assert_eq!(is("2.5 million", "2500000", None), Comparison::Right);
}

#[test]
fn columns_hold_numbers_or_worked_solutions() {
    let of = |v: Value| expected_number(&v).map(|n| n.value.to_string());
    assert_eq!(of(Value::from(7)).as_deref(), Some("7"));
    assert_eq!(of(Value::from(0.1)).as_deref(), Some("1/10"));
    assert_eq!(of(Value::from("$1,234")).as_deref(), Some("1234"));
    assert_eq!(
        of(Value::from("6 * 7 = 42\n#### 42")).as_deref(),
        Some("42")
    );
    assert_eq!(
        of(Value::from(r"So $\boxed{\frac12}$.")).as_deref(),
        Some("1/2")
    );
    for none in ["seven", "7 or 8", "x = 7 apples", ""] {
        assert_eq!(of(Value::from(none)), None, "{none}");
    }
}

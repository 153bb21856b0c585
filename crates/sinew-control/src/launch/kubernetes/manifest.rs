//! Manifests from the templates of the Helm chart, so that chart and launcher share them.
//!
//! The templates have two forms of placeholders: `{{ .Values.NAME }}` for a plain text, and
//! `{{ .Values.NAME | toJson }}` for any value, since JSON is YAML. Helm fills in the same ones.

use serde_json::{Map, Value};

/// The manifests of a run: secret, recipe, rights, service, network policy and the job of the owner.
pub(crate) const RUN_TEMPLATE: &str =
    include_str!("../../../../../deploy/helm/sinew/templates/run.yaml");
/// The manifest of a role.
pub(crate) const ROLE_TEMPLATE: &str =
    include_str!("../../../../../deploy/helm/sinew/files/role.yaml");

/// Fills in a template, and reads its documents.
///
/// # Errors
/// A placeholder without a value, or a document that is no YAML, in words.
pub(crate) fn manifests(template: &str, values: &Map<String, Value>) -> Result<Vec<Value>, String> {
    let text = filled(template, values)?;
    let mut documents = vec![String::new()];
    for line in text.lines() {
        if line.trim_end() == "---" {
            documents.push(String::new());
        } else if let Some(document) = documents.last_mut() {
            document.push_str(line);
            document.push('\n');
        }
    }
    let read = |text: &String| serde_saphyr::from_str(text).map_err(|e| e.to_string());
    documents.iter().map(read).collect()
}

fn filled(template: &str, values: &Map<String, Value>) -> Result<String, String> {
    let (mut text, mut rest) = (String::new(), template);
    while let Some((before, after)) = rest.split_once("{{") {
        text.push_str(before);
        let (inside, after) = after.split_once("}}").ok_or("a placeholder does not end")?;
        let (name, as_json) = match inside.trim().split_once('|') {
            Some((name, filter)) if filter.trim() == "toJson" => (name.trim(), true),
            Some((_, filter)) => return Err(format!("the filter {filter:?} is not known")),
            None => (inside.trim(), false),
        };
        let name = name.strip_prefix(".Values.").unwrap_or(name);
        let value = values
            .get(name)
            .ok_or_else(|| format!("{name} has no value"))?;
        match value {
            Value::String(plain) if !as_json => text.push_str(plain),
            value => text.push_str(&value.to_string()),
        }
        rest = after;
    }
    text.push_str(rest);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn placeholders_are_filled_in_or_named() {
        let Value::Object(values) = json!({"name": "a", "list": ["x: y", 1]}) else {
            panic!("no object");
        };
        let template = "n: {{ .Values.name }}-b\n---\nl: {{ .Values.list | toJson }}\n";
        let read = manifests(template, &values).unwrap();
        assert_eq!(read, [json!({"n": "a-b"}), json!({"l": ["x: y", 1]})]);
        let missing = manifests("{{ .Values.other }}", &values).unwrap_err();
        assert!(missing.contains("other"), "{missing}");
        assert!(manifests("{{ .Values.name | upper }}", &values).is_err());
    }
}

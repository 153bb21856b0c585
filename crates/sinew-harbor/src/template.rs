//! Variables of tasks that may be templates: `${NAME}` and `${NAME:-default}`.
//!
//! A task is somebody else's text: a variable of the host is passed only if the recipe names it.

use std::collections::BTreeMap;

/// Values of the variables that a recipe passes, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassedEnv(BTreeMap<String, String>);

impl PassedEnv {
    /// Takes the named variables, as far as `lookup` has them.
    pub fn new(names: &[String], lookup: &dyn Fn(&str) -> Option<String>) -> Self {
        let one = |name: &String| Some((name.clone(), lookup(name)?));
        Self(names.iter().filter_map(one).collect())
    }

    /// Fills the templates of variables.
    ///
    /// # Errors
    /// The name of a variable that is not passed and has no default.
    pub fn fill(&self, env: &BTreeMap<String, String>) -> Result<Vec<(String, String)>, String> {
        let one = |(name, text): (&String, &String)| Ok((name.clone(), self.text(text)?));
        env.iter().map(one).collect()
    }

    fn text(&self, text: &str) -> Result<String, String> {
        let (mut out, mut rest) = (String::new(), text);
        while let Some((before, after)) = rest.split_once("${") {
            out.push_str(before);
            let Some((inner, after)) = after.split_once('}') else {
                out.push_str("${");
                rest = after;
                continue;
            };
            let (name, default) = match inner.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (inner, None),
            };
            let value = self.0.get(name).map(String::as_str).or(default);
            out.push_str(value.ok_or_else(|| name.to_owned())?);
            rest = after;
        }
        out.push_str(rest);
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_variables_that_the_recipe_names_are_passed() {
        let host = |name: &str| (name != "ABSENT").then(|| format!("<{name}>"));
        let names = ["KEY".to_owned(), "ABSENT".to_owned()];
        let passed = PassedEnv::new(&names, &host);
        let fill = |text: &str| passed.fill(&BTreeMap::from([("A".into(), text.into())]));
        let is = |text: &str| vec![("A".to_owned(), text.to_owned())];
        assert_eq!(fill("x"), Ok(is("x")));
        assert_eq!(fill("a ${KEY}/${KEY}"), Ok(is("a <KEY>/<KEY>")));
        assert_eq!(fill("${OTHER:-d}"), Ok(is("d")));
        assert_eq!(fill("${OTHER}"), Err("OTHER".to_owned()));
        assert_eq!(fill("${ABSENT}"), Err("ABSENT".to_owned()));
        assert_eq!(fill("${KEY"), Ok(is("${KEY")));
    }
}

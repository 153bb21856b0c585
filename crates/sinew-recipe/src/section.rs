//! Macros that define a table of a recipe in one place: its keys with documentation, defaults and ranges.
//!
//! [`section`] generates two types: the keys as written, all optional, and the plan, in which every key has a
//! value. [`choice`] generates an enum of allowed names.
//!
//! The documentation of a key is its description in the schema and in `docs/recipe-keys.md`, too. A range
//! that depends on other keys cannot be declared with the key: it is a rule of the table, and the
//! documentation of the key has to mention it.

/// Defines a table: `typed as plan` with one line for each key, `key: type [= default [, in low to high]];`.
/// A key without a default stays optional in the plan.
macro_rules! section {
    (
        $(#[$meta:meta])*
        $keys:ident => $plan:ident, $table:literal {
            $(
                $(#[doc = $doc:literal])*
                $field:ident $(as $name:literal)?: $type:ty
                $(= $default:expr $(, in $low:literal to $high:literal)?)?;
            )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq)]
        #[derive(serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $keys {
            $(
                $(#[doc = $doc])*
                $(#[serde(rename = $name)])?
                $($(#[schemars(range(min = $low, max = $high))])?)?
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub(crate) $field: Option<$type>,
            )*
        }

        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $plan {
            $(
                $(#[doc = $doc])*
                pub $field: crate::section::plan_type!($type $(, $default)?),
            )*
        }

        impl Default for $plan {
            fn default() -> Self {
                $keys::default().resolve()
            }
        }

        impl $keys {
            /// Fills in the defaults.
            pub(crate) fn resolve(self) -> $plan {
                $plan {
                    $($field: crate::section::resolved!(self.$field $(, $default)?),)*
                }
            }

            /// Removes keys by path, such as `train.steps`; keys of other tables are ignored.
            pub(crate) fn leave_out(&mut self, keys: &[String]) {
                $(
                    let name = crate::section::key!($table, $field $(, $name)?);
                    if keys.iter().any(|k| k == name) {
                        self.$field = None;
                    }
                )*
            }
        }

        impl $plan {
            /// Returns the keys of this plan, with all values explicit.
            pub(crate) fn keys(&self) -> $keys {
                $keys {
                    $($field: crate::section::typed!(self.$field $(, $default)?),)*
                }
            }

            /// Adds the ranges of the table.
            pub(crate) fn ranges(&self, rules: &mut crate::rule::Rules) {
                $($($(
                    rules.range(concat!($table, ".", stringify!($field)), self.$field, $low..=$high);
                )?)?)*
                let _ = rules;
            }
        }
    };
}

macro_rules! plan_type {
    ($type:ty) => { Option<$type> };
    ($type:ty, $default:expr) => { $type };
}

macro_rules! resolved {
    ($value:expr) => {
        $value
    };
    ($value:expr, $default:expr) => {
        $value.unwrap_or_else(|| $default)
    };
}

macro_rules! typed {
    ($value:expr) => {
        $value.clone()
    };
    ($value:expr, $default:expr) => {
        Some($value.clone())
    };
}

macro_rules! key {
    ($table:literal, $field:ident) => {
        concat!($table, ".", stringify!($field))
    };
    ($table:literal, $field:ident, $name:literal) => {
        concat!($table, ".", $name)
    };
}

/// Defines an enum of allowed names; the first one is the default.
macro_rules! choice {
    (
        $(#[$meta:meta])*
        $choice:ident {
            $(#[$first_meta:meta])* $first:ident = $first_name:literal
            $(, $(#[$variant_meta:meta])* $variant:ident = $name:literal)* $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[derive(serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        pub enum $choice {
            $(#[$first_meta])*
            #[default]
            #[serde(rename = $first_name)]
            $first,
            $(
                $(#[$variant_meta])*
                #[serde(rename = $name)]
                $variant,
            )*
        }

        impl $choice {
            /// Returns the name used in recipes.
            pub fn name(self) -> &'static str {
                match self {
                    Self::$first => $first_name,
                    $(Self::$variant => $name,)*
                }
            }
        }

        impl std::fmt::Display for $choice {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

pub(crate) use {choice, key, plan_type, resolved, section, typed};

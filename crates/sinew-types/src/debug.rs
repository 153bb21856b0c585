//! `Debug` of types with parts that cannot be shown.

/// Implements `Debug` for a type by the fields that can be shown: `debug_fields!(Judge, config)`, or by
/// values of its own: `debug_fields!(Worlds as this, envs = this.envs.name())`.
#[macro_export]
macro_rules! debug_fields {
    ($type:ident $(, $field:ident)* $(,)?) => {
        impl ::std::fmt::Debug for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.debug_struct(stringify!($type))
                    $(.field(stringify!($field), &self.$field))*
                    .finish_non_exhaustive()
            }
        }
    };
    ($type:ident as $this:ident $(, $field:ident = $value:expr)+ $(,)?) => {
        impl ::std::fmt::Debug for $type {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                let $this = self;
                f.debug_struct(stringify!($type))
                    $(.field(stringify!($field), &$value))+
                    .finish_non_exhaustive()
            }
        }
    };
}

import pytest

from proxy.render.chat_template import ChatTemplates

CONTENT_FORMATS = [
    ("string", "{{ m.content }}"),
    ("string", "{{ m['content'] | trim }}"),
    ("string", "{% set content = m.content %}{{ content.split('x')[-1] }}"),
    ("string", "{% for line in m.content.split('x') %}{{ line }}{% endfor %}"),
    ("string", "{% if m.content[0] == '{' %}{{ m.content[1:] }}{% endif %}"),
    ("string", "{% macro f(rows) %}{% for r in rows %}{{ r }}{% endfor %}{% endmacro %}{{ f(tools) }}"),
    ("string", "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"),
    ("parts", "{% for p in m.content %}{{ p.text }}{% endfor %}"),
    ("parts", "{% for p in m['content'] if p.type == 'text' %}{{ p.text }}{% endfor %}"),
    ("parts", "{% for p in m.content[1:] %}{{ p.text }}{% endfor %}"),
    ("parts", "{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}"),
    ("parts", "{% set c = m.content or [] %}{% set d = c %}{% for p in d %}{{ p }}{% endfor %}"),
    ("parts", "{% macro f(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{{ f(m.content) }}"),
    ("parts", "{% macro f(x, c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}{{ f(1, c=m.content) }}"),
    ("parts", "{% macro f(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"),
    ("parts", "{{ m.content[0].text }}"),
    ("parts", "{{ m['content'][0]['text'] }}"),
    ("parts", "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}"),
    ("parts", "{% for p in (m.content if m.content is not string else []) %}{{ p }}{% endfor %}"),
    ("parts", "{% for p in ([] if m.content is string else m.content) | list %}{{ p }}{% endfor %}"),
]


@pytest.mark.parametrize(("expected", "body"), CONTENT_FORMATS)
def test_the_content_format_is_read_from_what_the_template_does_with_a_content(expected: str, body: str) -> None:
    template = "{% for m in messages %}" + body + "{% endfor %}"
    assert ChatTemplates({"default": template}, {}).select(None, None).content_format == expected


@pytest.mark.parametrize(
    ("expected", "template"),
    [
        (True, "{% if messages[0].role == 'developer' %}x{% endif %}"),
        (True, "{% if messages[0]['role'] in ['system', 'developer'] %}x{% endif %}"),
        (False, "{{ messages[0].role }}"),
        (False, "You help developers and the developer.{% if messages[0].role == 'system' %}x{% endif %}"),
    ],
)
def test_a_template_knows_the_developer_if_it_has_a_word_for_the_role(expected: bool, template: str) -> None:
    assert ChatTemplates({"default": template}, {}).select(None, None).knows_developer is expected

"""The paper at full scale: Inception on an image folder, its five variants, and how they are evaluated."""
